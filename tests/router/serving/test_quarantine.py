from __future__ import annotations

from router.serving.quarantine import DEADLY, KEPT, KEPT_S, Quarantine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_second_engine_is_one_too_many() -> None:
    quarantine = Quarantine(clock=Clock())
    assert not quarantine
    assert not quarantine.note(b"deadly")
    assert quarantine
    assert not quarantine.holds(b"deadly"), "the first may have died of something else"
    assert quarantine.note(b"deadly")
    assert quarantine.holds(b"deadly")
    assert not quarantine.holds(b"another")


def test_it_is_kept_for_a_time() -> None:
    clock = Clock()
    quarantine = Quarantine(clock=clock)
    for _ in range(DEADLY):
        quarantine.note(b"deadly")
    clock.now = KEPT_S - 1
    assert quarantine.holds(b"deadly")
    clock.now = KEPT_S
    assert not quarantine.holds(b"deadly")
    assert not quarantine, "and then forgotten"


def test_it_does_not_grow() -> None:
    quarantine = Quarantine(clock=Clock())
    for number in range(3 * KEPT):
        quarantine.note(b"%d" % number)
        quarantine.note(b"often")
    assert len(quarantine._ended) == KEPT
    assert quarantine.holds(b"often")
