from __future__ import annotations

from router.serving.quarantine import DEADLY, FALLEN_S, KEPT, KEPT_S, Quarantine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_second_engine_is_one_too_many() -> None:
    quarantine = Quarantine(clock=Clock())
    assert not quarantine.ended
    assert not quarantine.note(b"deadly", "a")
    assert quarantine.ended
    assert not quarantine.holds(b"deadly"), "the first may have died of something else"
    assert quarantine.note(b"deadly", "b")
    assert quarantine.holds(b"deadly")
    assert not quarantine.holds(b"another")


def test_it_is_kept_for_a_time() -> None:
    clock = Clock()
    quarantine = Quarantine(clock=clock)
    for number in range(DEADLY):
        quarantine.note(b"deadly", f"{number}")
    clock.now = KEPT_S - 1
    assert quarantine.holds(b"deadly")
    clock.now = KEPT_S
    assert not quarantine.holds(b"deadly")
    assert not quarantine.ended, "and then forgotten"


def test_it_does_not_grow() -> None:
    clock = Clock()
    quarantine = Quarantine(clock=clock)
    for number in range(3 * KEPT):
        quarantine.note(b"%d" % number, f"a{number}")
        quarantine.note(b"often", f"b{number}")
        clock.now += 1.0
    assert len(quarantine.ended) <= KEPT
    assert len(quarantine._fallen) <= 2 * FALLEN_S
    assert quarantine.holds(b"often")


def test_an_engine_that_was_dead_before_did_not_die_of_this() -> None:
    clock = Clock()
    quarantine = Quarantine(clock=clock)
    quarantine.note(b"deadly", "a")
    for _ in range(10):
        assert not quarantine.note(b"deadly", "a")
        assert not quarantine.note(b"innocent", "a")
    assert not quarantine.note(b"innocent", "b")
    assert not quarantine.holds(b"innocent")
    clock.now = FALLEN_S
    assert quarantine.note(b"deadly", "a"), "it came back, and died again"


def test_what_one_domain_sent_is_not_told_to_another() -> None:
    quarantine = Quarantine(clock=Clock())
    for number in range(DEADLY):
        quarantine.note(b"deadly", f"{number}", "tenant:a")
    assert quarantine.holds(b"deadly", "tenant:a")
    assert not quarantine.holds(b"deadly", "tenant:b")
    assert not quarantine.holds(b"deadly")
