"""Beam search on top of generation: one token a round, the best beams go on."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input import ProcessedPrompt

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
      beam_width: beams kept, and returned.
      max_tokens: most new tokens of a beam.
      ignore_eos: go on after an end-of-sequence token.
      temperature: divides the logits before the log probabilities that are added up.
      length_penalty: a beam's score is its log probability over length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in ("beam_width", "max_tokens"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(field, value, "must be an integer of at least 1")
        if self.temperature != 0.0:
            raise ParameterError("temperature", self.temperature, "beams are scored at 0 only")


@dataclasses.dataclass(slots=True)
class Beam:
    """A continuation and its log probability."""

    token_ids: list[int]
    cumulative_logprob: float
    text: str = ""
    finish_reason: str | None = None

    def score(self, length_penalty: float) -> float:
        return self.cumulative_logprob / max(len(self.token_ids), 1) ** length_penalty


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    beams: list[Beam]


def search_beams(
    llm: "LLM", prompts: list[ProcessedPrompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Runs all prompts' beams together; a prompt's beams share their prefix in the cache."""
    step = SamplingParams(
        temperature=0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False,
        ignore_eos=True,
    )  # fmt: skip
    live: list[list[Beam]] = [[Beam([], 0.0)] for _ in prompts]
    done: list[list[Beam]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        places = [(i, beam) for i, beams in enumerate(live) for beam in beams]
        if not places:
            break
        requests = [_request(prompts[i], beam.token_ids) for i, beam in places]
        outputs = llm.generate(requests, step, use_tqdm=False)
        grown: list[list[Beam]] = [[] for _ in prompts]
        for (i, beam), output in zip(places, outputs, strict=True):
            for token, entry in (output.outputs[0].logprobs or [{}])[0].items():
                total = beam.cumulative_logprob + entry.logprob
                longer = Beam([*beam.token_ids, token], total)
                if token in llm.eos_token_ids and not params.ignore_eos:
                    longer.finish_reason = "stop"
                    done[i].append(longer)
                else:
                    grown[i].append(longer)
        for i, beams in enumerate(grown):
            beams.sort(key=lambda beam: -beam.cumulative_logprob)
            live[i] = beams[: params.beam_width]
    results = []
    for i, prompt in enumerate(prompts):
        for beam in live[i]:
            beam.finish_reason = "length"
        beams = done[i] + live[i]
        beams.sort(key=lambda beam: -beam.score(params.length_penalty))
        best = beams[: params.beam_width]
        for beam in best:
            beam.text = _text(llm, prompt, beam)
        results.append(BeamSearchOutput(best))
    return results


def _request(prompt: ProcessedPrompt, tail: list[int]) -> dict[str, Any]:
    ids: dict[str, Any] = {"prompt_token_ids": [*prompt.token_ids, *tail]}
    return ids if prompt.cache_salt is None else {**ids, "cache_salt": prompt.cache_salt}


def _text(llm: "LLM", prompt: ProcessedPrompt, beam: Beam) -> str:
    from jaxllm.text.output import SequenceText

    tokenizer = llm._engine.tokenizer
    text = SequenceText(tokenizer, prompt.token_ids, SamplingParams())
    for token in beam.token_ids:
        text.append(token, ends=token in llm.eos_token_ids)
    text.finish()
    return text.text
