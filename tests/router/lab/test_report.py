"""What is told of a comparison: table cells, JSON, and the page with its pictures."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly import graph_objects  # type: ignore[import-untyped]

from router.lab.bounds import HitBounds
from router.lab.compare import Run
from router.lab.fleet_model import EngineSpec
from router.lab.measures import Measures, measure
from router.lab.profiles import PROFILES
from router.lab.replay import Outage, Replayed, Served, Setup
from router.lab.report import (
    COLUMNS,
    CURVE_POINTS,
    Report,
    cache_tokens,
    cumulative_ttft,
    engines_text,
    one_line,
    queue,
    seconds,
    summary,
    tpots_ms,
    ttfts_by_length,
)
from router.lab.report_figures import SERIES_COLOURS, figures
from router.lab.report_html import page
from router.lab.traces import Trace, TraceRequest

H100, H200 = EngineSpec(PROFILES["llama-3.1-8b-h100"]), EngineSpec(PROFILES["llama-3.1-8b-h200"])
TITLES = [
    "TTFT by prompt length",
    "TTFT, cumulative",
    "TPOT",
    "Goodput",
    "Hit rate",
    "Duplicates, imbalance, refusals",
    "Queue over time",
]


def served(
    arrived_at: float, first: float | None, *, tokens: int = 1_000, output: int = 11, refused: str = ""
) -> Served:
    """Its answer, if it has one, takes a second after the first token."""
    return Served(
        f"{arrived_at}",
        "",
        1,
        arrived_at,
        tokens,
        output,
        0.1,
        placed_at=arrived_at,
        first_token_at=first,
        finished_at=None if first is None else first + 1.0,
        refused=refused,
    )


def replayed(*requests: Served, policy: str = "lmetric") -> Replayed:
    return Replayed(policy, list(requests), 20.0, [2.0, 1.0], 0, 0.25, None)


SOME = (
    served(0.0, 1.0, tokens=2_047),
    served(0.5, 4.5, tokens=2_048),
    served(1.0, 1.5, tokens=32_768, output=1),
    served(2.0, None, tokens=9_000, refused="room_full"),
)


def report(*runs: Replayed, name: str = "t", setup: Setup | None = None) -> Report:
    trace = Trace(name, 512, [TraceRequest("0", 0.0, 600, 5, [1, 2]), TraceRequest("1", 1.0, 400, 7, [3])])
    return Report(
        trace=trace,
        reading={"speed": 4.0, "limit": None},
        setup=setup or Setup(engines=[H100] * 2 + [H200]),
        seed=3,
        bounds=HitBounds(0.373, 0.157),
        runs=[Run(measure(run), run) for run in runs or (replayed(*SOME),)],
    )


class TestTable:
    @pytest.mark.parametrize(
        ("value", "shown"), [(None, "–"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
    )
    def test_seconds(self, value: float | None, shown: str) -> None:
        assert seconds(value) == shown

    def test_every_column_has_a_field_and_a_meaning(self) -> None:
        assert {column.field for column in COLUMNS} <= set(Measures.__struct_fields__)
        assert all(column.meaning for column in COLUMNS)

    def test_the_best_cell(self) -> None:
        slow, quick = (Run(measure(run), run) for run in (replayed(served(0, 4.0)), replayed(served(0, 1.0))))
        by_field = {column.field: column for column in COLUMNS}
        assert by_field["ttft_mean_s"].best([slow, quick]) == "1.00"
        assert by_field["goodput"].best([slow, quick]) == "100.0%"
        assert by_field["refused"].best([slow, quick]) is None  # both have none
        assert by_field["longest_wait_s"].best([slow, quick]) is None  # nobody says which is better
        assert by_field["ttft_mean_s"].best([slow]) is None

    def test_a_run_without_a_value_is_not_the_best(self) -> None:
        run = Run(measure(replayed(served(0, 4.0))), replayed())
        none = Run(measure(replayed(served(0, None, refused="room_full"))), replayed())
        ttft = COLUMNS[0]
        assert (ttft.cell(none.measures), ttft.best([run, none])) == ("–", "4.00")

    def test_the_line_below(self) -> None:
        assert one_line(report()) == (
            "2 requests on 2 × llama-3.1-8b-h100 + 1 × llama-3.1-8b-h200; hit rate with endless caches 37.3%, with one"
            " LRU cache of all engines' size 15.7%"
        )

    def test_engines_are_counted_by_name(self) -> None:
        assert engines_text(Setup(engines=[H200, H100, H200])) == "2 × llama-3.1-8b-h200 + 1 × llama-3.1-8b-h100"

    def test_a_cache_holds_whole_blocks(self) -> None:
        assert cache_tokens(H100, 512) == 859 * 512
        assert cache_tokens(EngineSpec(PROFILES["llama-3.1-8b-h100"], capacity_tokens=1_000), 512) == 512


class TestSummary:
    def test_it_says_what_was_run_and_what_came_of_it(self) -> None:
        told = summary(report(setup=Setup(engines=[H100], event_loss=0.1, outages=[Outage(0, 5.0, 9.0)])))
        assert told["trace"] == {
            "name": "t",
            "requests": 2,
            "input_tokens": 1_000,
            "output_tokens": 12,
            "block_size": 512,
            "speed": 4.0,
            "limit": None,
        }
        assert told["setup"]["engines"] == [
            {"name": "llama-3.1-8b-h100", "capacity_tokens": 439_808, "max_batched_tokens": 8_192}
        ]
        assert (told["setup"]["event_loss"], told["setup"]["seed"]) == (0.1, 3)
        assert told["setup"]["outages"] == [{"engine": 0, "at_s": 5.0, "back_s": 9.0}]
        assert told["bounds"] == {"infinite": 0.373, "pooled_lru": 0.157}
        (lmetric,) = told["policies"]
        assert set(lmetric) == set(Measures.__struct_fields__)
        assert (lmetric["policy"], lmetric["refused"], lmetric["goodput"]) == ("lmetric", 1, 0.5)

    def test_a_chunk_of_ones_own(self) -> None:
        chunked = EngineSpec(PROFILES["llama-3.1-8b-h100"], max_batched_tokens=2_048)
        assert summary(report(setup=Setup(engines=[chunked])))["setup"]["engines"][0]["max_batched_tokens"] == 2_048


class TestDistributions:
    def test_ttft_by_length(self) -> None:
        assert ttfts_by_length(replayed(*SOME)) == [[1.0], [4.0], [], [0.5]]

    def test_those_never_served_keep_the_curve_below_one(self) -> None:
        assert cumulative_ttft(replayed(*SOME)) == ([0.5, 1.0, 4.0], [0.25, 0.5, 0.75])

    def test_of_one_and_of_none(self) -> None:
        assert cumulative_ttft(replayed(served(0, 2.0))) == ([2.0], [1.0])
        assert cumulative_ttft(replayed(served(0, None, refused="room_full"))) == ([], [])

    def test_a_long_curve_keeps_its_ends(self) -> None:
        ttfts, shares = cumulative_ttft(replayed(*(served(0, float(n)) for n in range(1, 5_001))))
        assert len(ttfts) == CURVE_POINTS + 1
        assert (ttfts[0], ttfts[-1], shares[0], shares[-1]) == (1.0, 5_000.0, 1 / 5_000, 1.0)
        assert all(share == ttft / 5_000 for ttft, share in zip(ttfts, shares, strict=True))

    def test_tpot_is_of_answers_with_a_second_token(self) -> None:
        assert tpots_ms(replayed(*SOME)) == [100.0, 100.0]

    def test_queue(self) -> None:
        """Two come at 0 and 0.5; one is begun at 1, a third comes at 1, begun at 1.5; the last is begun at 4.5."""
        times, waiting = queue(replayed(*SOME))
        assert (len(times), times[0]) == (CURVE_POINTS + 1, 0.0)
        assert times[-1] == pytest.approx(4.5)
        at = {moment: waiting[int(moment / 4.5 * CURVE_POINTS)] for moment in (0.2, 0.7, 1.2, 2.0, 4.4)}
        assert at == {0.2: 1, 0.7: 2, 1.2: 2, 2.0: 1, 4.4: 1}
        assert waiting[-1] == 1  # until that very moment

    def test_a_peak_between_two_points_is_seen(self) -> None:
        crowd = [served(500.01, 500.02) for _ in range(7)]
        assert max(queue(replayed(served(0, 0.1), *crowd, served(999, 1_000)))[1]) == 7

    def test_nobody_was_ever_served(self) -> None:
        assert queue(replayed(served(0, None, refused="room_full"))) == ([], [])


def _plain(part: Any) -> Any:
    """Colours as the page puts them in."""
    if isinstance(part, dict):
        return {key: _plain(inner) for key, inner in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(inner) for inner in part]
    return "#123456" if isinstance(part, str) and part.startswith("var(") else part


class TestFigures:
    def test_plotly_knows_every_property(self) -> None:
        for figure in figures(report(replayed(*SOME), replayed(*SOME, policy="random"))):
            graph_objects.Figure(_plain(figure.data), _plain(figure.layout))

    def test_all_show_all_policies(self) -> None:
        for figure in figures(report(replayed(*SOME), replayed(*SOME, policy="random"))):
            assert {trace["name"] for trace in figure.data} == {"lmetric", "random"}, figure.title

    def test_hit_rate_is_shown_beside_its_bounds(self) -> None:
        (hits,) = [figure for figure in figures(report()) if figure.title == "Hit rate"]
        assert [shape["x0"] for shape in hits.layout["shapes"]] == [0.157, 0.373]
        assert [note["text"] for note in hits.layout["annotations"]] == [
            "one LRU cache of all engines' size: 15.7%",
            "endless caches: 37.3%",
        ]

    def test_policies_beyond_the_colours_can_be_told_apart(self) -> None:
        names = [f"p{number}" for number in range(SERIES_COLOURS + 1)]
        drawn = figures(report(*(replayed(*SOME, policy=name) for name in names)))
        for title, looks in (("TTFT, cumulative", "line"), ("Goodput", "marker")):
            (figure,) = [figure for figure in drawn if figure.title == title]
            by_name = {trace["name"]: json.dumps(trace[looks]) for trace in figure.data}
            assert len(set(by_name.values())) == len(names)


class _Parts(HTMLParser):
    """Everything that could load something, and the text within style, script and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[tuple[str, str | None]] = []
        self.inside: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open = tag
        self.sources += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self._open, []).append(data)


class TestPage:
    def test_it_needs_nothing_else(self) -> None:
        parts = _Parts(page(report()))
        assert parts.sources == []
        assert not {"link", "iframe", "img", "object", "embed"} & set(parts.tags)
        (style,) = parts.inside["style"]
        assert "url(" not in style
        assert "@import" not in style
        assert any("plotly.js v" in script for script in parts.inside["script"])

    def test_a_browser_would_refuse_to_fetch_anything(self) -> None:
        assert "Content-Security-Policy\" content=\"default-src 'none';" in page(report())

    def test_table_and_titles(self) -> None:
        text = page(report(replayed(*SOME), replayed(*SOME, policy="kv_aware:push")))
        parts = _Parts(text)
        assert parts.inside["h2"] == TITLES
        for policy in ("lmetric", "kv_aware:push"):
            assert f"</span>{policy}</th>" in text
            assert f"</span>{policy}</button>" in text
        assert parts.inside["td"][: len(COLUMNS)] == [column.cell(measure(replayed(*SOME))) for column in COLUMNS]

    def test_its_data_can_be_read(self) -> None:
        (script,) = [script for script in _Parts(page(report())).inside["script"] if "const figures" in script]
        found = json.loads(script.split("const figures = ", 1)[1].split(";\n", 1)[0])
        assert len(found) == len(TITLES)

    def test_names_are_text_and_nothing_else(self) -> None:
        evil = "</script><img src=x onerror=alert(1)>"
        text = page(report(replayed(*SOME, policy=evil), name=evil))
        assert "<img" not in _markup(text)
        assert _Parts(text).inside["title"] == [f"{evil}: policies compared"]

    def test_how_it_was_run(self) -> None:
        text = page(report(setup=Setup(engines=[H100], event_loss=0.25, outages=[Outage(0, 5.0, 9.0)])))
        assert "lost: 25.0%" in text
        assert "engine 0, 5 s to 9 s" in text
        assert "<dt>limit</dt>" not in text

    def test_a_policy_that_served_nobody(self) -> None:
        text = page(report(replayed(served(0, None, refused="room_full"))))
        assert "–" in _Parts(text).inside["td"]


def _markup(text: str) -> str:
    """Without plotly's own script, which is long and not ours."""
    begin = text.index("<script>/**")
    return text[:begin] + text[text.index("</script>", begin) :]
