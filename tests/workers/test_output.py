"""Stops inside a block of tokens that one step commits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spectrue.workers.core import Request, RequestOutput, SamplingParams, SlotOutput
from spectrue.workers.output import OutputProcessor
from spectrue.workers.scheduler import RequestState

EOS = 0


class Letters:
    """A detokenizer of one letter a token: 1 is "a", 2 is "b", ..., EOS is nothing."""

    def push(self, token_ids: Any) -> str:
        return "".join(chr(96 + t) for t in token_ids if t != EOS)

    def finish(self) -> str:
        return ""


def ids(text: str) -> list[int]:
    return [EOS if c == "$" else ord(c) - 96 for c in text]


def run(blocks: list[str], **params: Any) -> tuple[str, list[RequestOutput], RequestState]:
    """Process blocks of letters ("$" is EOS) until one stops."""
    params = {"max_tokens": 100, **params}
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(**params))
    state = RequestState(request, seed=0, max_len=1 + params["max_tokens"], max_draft_tokens=8)
    processor = OutputProcessor(state, Letters(), [EOS])  # type: ignore[arg-type]
    outputs = []
    for block in blocks:
        slot = SlotOutput(slot=0, token_ids=tuple(ids(block)), num_accepted_tokens=len(block) - 1)
        kept, output = processor.process(slot)
        state.token_ids += kept
        outputs.append(output)
        if output.finish_reason is not None:
            break
    return "".join(o.text for o in outputs), outputs, state


def test_a_cap_does_not_hide_a_stop() -> None:
    """sglang#31599: [x, x, STOP, x, x, x] in one step with max_tokens=5."""
    text, (output,), _ = run(["abzcde"], max_tokens=5, stop_token_ids=(26,))
    assert (text, output.finish_reason, output.stop_reason) == ("ab", "stop", 26)
    assert len(output.token_ids) == 3


def test_a_stop_at_the_cap_is_a_stop() -> None:
    for blocks in (["abz"], ["a", "b", "z"]):
        _, outputs, _ = run(blocks, max_tokens=3, stop_token_ids=(26,))
        assert outputs[-1].finish_reason == "stop"
    _, outputs, _ = run(["abz"], max_tokens=3, stop=["z"])
    assert outputs[-1].finish_reason == "stop"


def test_an_earlier_stop_string_wins_over_eos() -> None:
    """vllm#23938: accepted "a STOP b <eos>" in one step."""
    text, (output,), _ = run(["astopb$"], stop=("stop",))
    assert (text, output.finish_reason, output.stop_reason) == ("a", "stop", "stop")
    assert len(output.token_ids) == 5


def test_eos_inside_a_block_ends_it() -> None:
    """transformers#47912, vllm#56101: 3 committed of 6; raw accepts are reported apart."""
    text, (output,), state = run(["ab$cde"])
    assert (text, len(output.token_ids), output.finish_reason) == ("ab", 3, "stop")
    assert output.stop_reason is None
    assert output.spec_decode.num_accepted_tokens == 5
    assert output.num_output_tokens == state.num_output_tokens == 3


def test_ignore_eos_goes_on() -> None:
    text, outputs, _ = run(["a$b"], ignore_eos=True)
    assert (text, outputs[-1].finish_reason) == ("ab", None)


def test_a_stop_token_shows_only_if_asked() -> None:
    assert run(["abz"], stop_token_ids=(26,))[0] == "ab"
    assert run(["abz"], stop_token_ids=(26,), include_stop_str_in_output=True)[0] == "abz"
    assert run(["astopb"], stop=("stop",), include_stop_str_in_output=True)[0] == "astop"


def test_a_stop_string_across_steps_is_never_sent() -> None:
    text, outputs, _ = run(["as", "to", "pb"], stop=("stop",))
    assert [o.text for o in outputs] == ["a", "", ""]
    assert text == "a"
    assert outputs[-1].num_output_tokens == 5  # the tokens that spell it count


def test_held_text_is_sent_when_it_was_no_stop() -> None:
    text, outputs, _ = run(["as", "to", "ab"], stop=("stop",))
    assert text == "astoab"
    assert outputs[0].text == "a"


def test_held_text_is_sent_at_every_other_end() -> None:
    assert run(["asto"], stop=("stop",), max_tokens=4)[0] == "asto"
    assert run(["asto$"], stop=("stop",))[0] == "asto"
    text, outputs, _ = run(["asto"], stop=("stop",))
    assert (text, outputs[-1].finish_reason) == ("a", None)


def test_no_stop_before_min_tokens() -> None:
    text, outputs, _ = run(["stopabstop"], stop=("stop",), min_tokens=5)
    assert text == "stopab"
    assert outputs[-1].finish_reason == "stop"


def test_length_cuts_the_block() -> None:
    text, (output,), _ = run(["abcdef"], max_tokens=4)
    assert (text, output.finish_reason, len(output.token_ids)) == ("abcd", "length", 4)


def test_an_error_keeps_what_was_accepted() -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9))
    state = RequestState(request, seed=0, max_len=10, max_draft_tokens=8)
    processor = OutputProcessor(state, Letters(), [EOS])  # type: ignore[arg-type]
    kept, output = processor.process(SlotOutput(slot=0, token_ids=(1, 2), error="NaN"))
    assert (kept, output.text, output.finish_reason) == ([1, 2], "ab", "error")
    assert output.error == "NaN"
    # A stop that was accepted before the bad row is a stop.
    _, output = processor.process(SlotOutput(slot=0, token_ids=(1, EOS), error="NaN"))
    assert (output.finish_reason, output.error) == ("stop", None)


def test_an_empty_step_is_no_token() -> None:
    """vllm#33729: nothing committed must not count as -1 accepted."""
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9))
    state = RequestState(request, seed=0, max_len=10, max_draft_tokens=8)
    processor = OutputProcessor(state, Letters(), [EOS])  # type: ignore[arg-type]
    kept, output = processor.process(SlotOutput(slot=0, error="all NaN"))
    assert (kept, output.finish_reason) == ([], "error")
    assert output.spec_decode.num_accepted_tokens == 0


@given(
    st.text(alphabet="ab$", max_size=14),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3),
    st.integers(1, 12),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=14, max_size=14),
)
def test_blocks_do_not_matter(
    text: str, stop: list[str], max_tokens: int, min_tokens: int, include: bool, sizes: list[int]
) -> None:
    """However a text is cut into steps, its output is that of one token at a time."""
    params: dict[str, Any] = {
        "stop": tuple(stop),
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        "include_stop_str_in_output": include,
    }
    ends = [0, *itertools.accumulate(sizes)]
    blocks = [text[a:b] for a, b in itertools.pairwise(ends) if text[a:b]]
    one, many = run(list(text), **params), run(blocks, **params)
    assert one[0] == many[0]
    assert one[2].token_ids == many[2].token_ids
    if one[1]:
        for name in ("finish_reason", "stop_reason", "num_output_tokens"):
            assert getattr(one[1][-1], name) == getattr(many[1][-1], name)


def test_real_text_is_the_decoded_tokens(tiny_llama: Path) -> None:
    from .harness import complete, make_engine, make_request

    engine = make_engine(tiny_llama, "ngram")
    assert engine.tokenizer is not None
    (done,) = complete(engine, make_request("r", [5, 9, 12, 7] * 4, seed=1, ignore_eos=True))
    assert done.text == engine.tokenizer.decode(done.token_ids)
