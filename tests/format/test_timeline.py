"""A timeline reads back as it was, a trace of it opens elsewhere, and what is damaged is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Mesh
from reshard_ckpt.core.timeline import ClockBounds, Step, Timeline
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format.files import decode_timeline, encode_timeline

MICROSECONDS = st.integers(0, 10**9).map(lambda n: n / 1e6)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    mesh = Mesh(tuple(f"a{i}" for i in range(len(sizes))), sizes)
    steps = draw(
        st.lists(
            st.builds(
                lambda rank, name, thread, start, length, size: Step(
                    rank % mesh.size, name, thread, start, round(start + length, 6), size
                ),
                st.integers(0, 30),
                st.sampled_from(["write", "sync", "größer", ""]),
                st.sampled_from(["caller", "save"]),
                MICROSECONDS,
                MICROSECONDS,
                st.integers(0, 2**60),
            )
        )
    )
    uncertainty = tuple(draw(MICROSECONDS) for _ in range(mesh.size))
    return Timeline("id", draw(MICROSECONDS), draw(st.sampled_from([mesh, None])), uncertainty, tuple(steps))


@given(timelines())
def test_reads_back_as_it_was(timeline: Timeline) -> None:
    assert decode_timeline(encode_timeline(timeline), where="x") == timeline


@given(timelines())
def test_trace_has_every_step_in_microseconds_and_names_each_rank(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(timeline.chrome_trace(), allow_nan=False))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(timeline.steps)
    for event, step in zip(slices, timeline.steps, strict=True):
        assert (event["pid"], event["name"], event["args"].get("bytes", 0)) == (step.rank, step.name, step.num_bytes)
        assert event["ts"] == pytest.approx(step.start_s * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(step.end_s * 1e6, abs=0.01)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: timeline.label(rank) for rank in range(timeline.num_ranks)}
    outputs = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert all(outputs[e["pid"], e["tid"]] == s.thread for e, s in zip(slices, timeline.steps, strict=True))


GOOD = Timeline("id", 1.0, Mesh(("dp",), (2,)), (0.0, 0.1), (Step(1, "write", "save", 0.0, 1.0, 7),))


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"mesh": {"axes": ["dp"], "sizes": [3]}},
        {"mesh": {"axes": ["dp", "tp"], "sizes": [2]}},
        {"mesh": {"axes": ["dp"], "sizes": [-2]}},
        {"uncertainty_s": [0, float("nan")]},
        {"began_s": float("inf")},
        {"began_s": True},
        {"began_s": 10**400},
        {"save_id": 3},
        {"steps": 3},
        {"steps": [[2, "write", "save", 0, 1, 7]]},
        {"steps": [[-1, "write", "save", 0, 1, 7]]},
        {"steps": [[0, "write", "save", 1, 0, 7]]},
        {"steps": [[0, "write", "save", 0, 1]]},
        {"steps": [[0, None, "save", 0, 1, 7]]},
        {"steps": [[0, "write", "save", 0, 1, -7]]},
    ],
    ids=str,
)
def test_what_is_no_timeline_is_refused(change: dict[str, object]) -> None:
    document = json.loads(encode_timeline(GOOD))
    with pytest.raises(CorruptError, match="^where: is no timeline"):
        decode_timeline(json.dumps({**document, **change}).encode(), where="where")


def test_cut_off_timeline_is_refused() -> None:
    data = encode_timeline(GOOD)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            decode_timeline(data[:end], where="where")
    with pytest.raises(CorruptError):
        decode_timeline(b"[" * 200_000, where="where")


@given(
    skew=st.floats(-1e4, 1e4),
    waits=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans()), min_size=1, max_size=6),
)
def test_offset_is_never_further_from_the_truth_than_it_says(skew: float, waits: list[tuple[float, float, bool]]) -> None:
    least, most = -1e9, 1e9
    for delay, lag, to_first in waits:  # messages that took that long, on both sides
        if to_first:
            least = max(least, skew - delay - lag)
        else:
            most = min(most, skew + delay + lag)
    bounds = ClockBounds(least, most)
    assert least <= bounds.offset <= most
    assert abs(bounds.offset - skew) <= bounds.uncertainty + 1e-6
