"""A timeline reads back as it was, a trace of it opens elsewhere, and what is damaged is refused by name."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_ckpt.core.catalog.specs import Mesh
from reshard_ckpt.core.timeline import STEP_NAMES, STEP_THREADS, Step, Timeline
from reshard_ckpt.engine.common.progress import clock_offset
from reshard_ckpt.errors import CorruptError
from reshard_ckpt.format.timeline import decode_timeline, encode_steps, encode_timeline

MICROSECONDS = st.integers(0, 10**9).map(lambda n: n / 1e6)


def encoded(timeline: Timeline) -> bytes:
    """Encode a timeline whose ranks all began when it did."""
    steps = [
        encode_steps(
            [(s.name, s.thread, began + s.start_s, began + s.end_s, s.num_bytes) for s in timeline.steps if s.rank == rank], began
        )
        for rank, began in enumerate([0.0] * timeline.num_ranks)
    ]
    columns = np.zeros(timeline.num_ranks), np.array(timeline.uncertainty_s)
    return encode_timeline(timeline.save_id, timeline.began_s, timeline.mesh, *columns, steps)


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
                st.sampled_from(STEP_NAMES),
                st.sampled_from(STEP_THREADS),
                MICROSECONDS,
                MICROSECONDS,
                st.integers(0, 2**60),
            )
        )
    )
    steps.sort(key=lambda step: (step.rank, step.start_s))
    uncertainty = tuple(draw(st.floats(0, 1e3, width=32)) for _ in range(mesh.size))
    return Timeline("id", draw(MICROSECONDS), draw(st.sampled_from([mesh, None])), uncertainty, tuple(steps))


@given(timelines())
def test_reads_back_as_it_was(timeline: Timeline) -> None:
    assert decode_timeline(encoded(timeline), where="x") == timeline


def test_a_step_of_a_name_without_a_code_is_kept_as_another() -> None:
    data = encode_timeline("id", 1.0, None, np.zeros(1), np.zeros(1), [encode_steps([("new", "save", 5.0, 6.5, 3)], 5.0)])
    assert decode_timeline(data, where="x").steps == (Step(0, "other", "save", 0.0, 1.5, 3),)


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


GOOD = Timeline("id", 1.0, Mesh(("dp",), (2,)), (0.0, 0.125), (Step(1, "write", "save", 0.0, 1.0, 7),))


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 1},
        {"mesh": [["dp"], [3]]},
        {"mesh": [["dp", "tp"], [2]]},
        {"mesh": [["dp"], [-2]]},
        {"uncertainty_s": np.array([0, np.nan], "<f4").tobytes()},
        {"uncertainty_s": bytes(4)},
        {"shift_s": np.array([0, np.inf], "<f8").tobytes()},
        {"shift_s": bytes(8)},
        {"began_s": float("inf")},
        {"began_s": True},
        {"save_id": 3},
        {"steps": 3},
        *(
            {"steps": msgpack.packb([]) + steps, "length": np.array([1, len(steps)], "<u4").tobytes()}
            for steps in (
                b"",
                b"\xff" * 20,
                msgpack.packb(3),
                msgpack.packb({}),
                msgpack.packb([0, 0, 0]),
                msgpack.packb([0, -1, 0, 0]),
                msgpack.packb([0, 0, -1, 0]),
                msgpack.packb([0, 0, 0, -1]),
                msgpack.packb([-1, 0, 0, 0]),
                msgpack.packb([127, 0, 0, 0]),
                msgpack.packb([0, 2**62, 2**63, 0]),
                msgpack.packb([0, 0, 0, True]),
                msgpack.packb([0, 0, 0.5, 0]),
            )
        ),
        {"length": np.array([0, 2000], "<u4").tobytes()},
        {"length": np.array([0, 0], "<u4").tobytes()},
        {"threads": []},
    ],
    ids=str,
)
def test_what_is_no_timeline_is_refused(change: dict[str, object]) -> None:
    document = msgpack.unpackb(encoded(GOOD))
    with pytest.raises(CorruptError, match="^where: is not a timeline"):
        decode_timeline(msgpack.packb({**document, **change}), where="where")


def test_cut_off_timeline_is_refused() -> None:
    data = encoded(GOOD)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            decode_timeline(data[:end], where="where")
    with pytest.raises(CorruptError):
        decode_timeline(b"\x91" * 200_000, where="where")


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
    offset, uncertainty = clock_offset(least, most)
    assert least <= offset <= most
    assert abs(offset - skew) <= uncertainty + 1e-6
