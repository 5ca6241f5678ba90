"""What requests ask to be changed in their logits before sampling: both halves, host and device.

Two forms travel. A bit mask [R, V / 32] says which tokens are allowed at all (allowed_token_ids,
grammars). Sparse entries (row, token) carry what is added to a logit (bias, or minus infinity for
bad words and for end ids before min_tokens) and how often the token occurred (penalties). The host
lists every token of a row once, so the device gathers, computes and scatters without a dense count.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.engine.request import GrammarState, MaskFiller, Request

# Least entries per row that an edit program is compiled for.
ENTRIES_PER_ROW = 64
ENTRY_FIELDS = 5
ROW_FIELDS = 3


def entry_buckets(rows: int, max_model_len: int) -> list[int]:
    """Numbers of entries that edit programs of `rows` rows are compiled for.

    The largest holds every token of full-length requests with the most biased tokens.
    """
    largest = rows * (max_model_len + 2048)
    sizes = [rows * ENTRIES_PER_ROW]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * 16, largest))
    return sizes


def mask_words(vocab_size: int) -> int:
    """int32 words of a row of the mask."""
    return -(-vocab_size // 32)


def token_bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Mask row int32 [W] with just these tokens allowed: token t is bit t % 32 of word t // 32."""
    allowed = np.zeros(mask_words(vocab_size) * 32, bool)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


class RowEdits:
    """Edits of one request, brought up to date as its tokens become known."""

    def __init__(self, request: Request, vocab_size: int):
        params = request.params
        self.request = request
        self.penalizes = params.penalizes
        self.allowed_bits = (
            None
            if params.allowed_token_ids is None
            else token_bits(params.allowed_token_ids, vocab_size)
        )
        self.end_ids = sorted(request.eos_token_ids | request.stop_ids)
        self.end_bits = token_bits(self.end_ids, vocab_size)
        self._index: dict[int, int] = {}
        self._tokens = np.zeros(64, np.int32)
        self._add = np.zeros(64, np.float32)
        self._counts = np.zeros(64, np.int32)
        self._seen = np.zeros(64, np.int32)
        self._num_read = 0
        for token, value in (params.logit_bias or {}).items():
            # The array may be replaced by a longer one, so the entry comes first.
            entry = self._entry(token)
            self._add[entry] = value

    def entries(
        self, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, added values, output counts and seen flags, each [N], every token once.

        mask: the row of allowed tokens int32 [W], None where all are.
        """
        if self.penalizes:
            self._read_tokens()
        forbidden = [self._entry(token) for token in self._forbidden(mask)]
        size = len(self._index)
        add = self._add[:size].copy()
        add[forbidden] = -np.inf
        return self._tokens[:size], add, self._counts[:size], self._seen[:size]

    def _forbidden(self, mask: np.ndarray | None) -> list[int]:
        request = self.request
        tokens = []
        if request.num_output_tokens < request.params.min_tokens:
            # A grammar that has ended leaves only end ids; they win over min_tokens.
            only_ends = mask is not None and not np.any(mask & ~self.end_bits)
            if not only_ends:
                tokens += self.end_ids
        output = request.token_ids
        start = request.num_prompt_tokens
        for word in request.bad_word_ids:
            head = len(word) - 1
            if head == 0 or (
                len(output) - start >= head and tuple(output[len(output) - head :]) == word[:-1]
            ):
                tokens.append(word[-1])
        return tokens

    def _read_tokens(self) -> None:
        request = self.request
        for position in range(self._num_read, request.num_tokens):
            entry = self._entry(request.token_ids[position])
            self._seen[entry] = 1
            self._counts[entry] += position >= request.num_prompt_tokens
        self._num_read = request.num_tokens

    def _entry(self, token: int) -> int:
        entry = self._index.setdefault(token, len(self._index))
        if entry == len(self._tokens):
            for name in ("_tokens", "_add", "_counts", "_seen"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._tokens[entry] = token
        return entry


def needs_edits(request: Request) -> bool:
    """Whether the request's logits are changed before sampling."""
    params = request.params
    return bool(
        params.penalizes
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or request.bad_word_ids
        or request.grammar is not None
    )


@dataclasses.dataclass(slots=True)
class PackedEdits:
    """A step's edits, ready to send.

    Attributes:
      mask: int32 [R, W], or None where no row has one.
      entries: int32 [ENTRY_FIELDS * N + ROW_FIELDS * R], or None where no row has any.
      num_entries: N, the bucket.
    """

    mask: np.ndarray | None
    entries: np.ndarray | None
    num_entries: int


def pack_edits(
    edits: Sequence[RowEdits | None], num_rows: int, max_model_len: int, vocab_size: int
) -> PackedEdits:
    """Packs the edits of a step's sampling rows, in their order.

    A row whose mask allows nothing, or cannot be computed, keeps all tokens and fails its request.
    """
    mask = _pack_masks(edits, num_rows, vocab_size)
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    row_fields = np.zeros((ROW_FIELDS, num_rows), np.float32)
    row_fields[0] = 1.0
    for i, row in enumerate(edits):
        if row is None:
            continue
        tokens, add, counts, seen = row.entries(None if mask is None else mask[i])
        values = (np.full(len(tokens), i), tokens, add.view(np.int32), counts, seen)
        for column, part in zip(columns, values, strict=True):
            column.append(part)
        params = row.request.params
        row_fields[:, i] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    count = sum(map(len, columns[0]))
    if not count:
        return PackedEdits(mask, None, 0)
    size = next(s for s in entry_buckets(num_rows, max_model_len) if s >= count)
    packed = np.zeros(ENTRY_FIELDS * size + ROW_FIELDS * num_rows, np.int32)
    matrix = packed[: ENTRY_FIELDS * size].reshape(ENTRY_FIELDS, size)
    for field, column in zip(matrix, columns, strict=True):
        field[:count] = np.concatenate(column)
    # A row beyond the last is dropped by the scatter.
    matrix[0, count:] = num_rows
    packed[ENTRY_FIELDS * size :] = row_fields.reshape(-1).view(np.int32)
    return PackedEdits(mask, packed, size)


def _pack_masks(
    edits: Sequence[RowEdits | None], num_rows: int, vocab_size: int
) -> np.ndarray | None:
    """Allowed tokens of every row, int32 [num_rows, W]; None where all rows may take any."""
    masked = [
        (i, row)
        for i, row in enumerate(edits)
        if row is not None and (row.allowed_bits is not None or row.request.grammar is not None)
    ]
    if not masked:
        return None
    mask = np.full((num_rows, mask_words(vocab_size)), -1, np.int32)
    errors = _fill_grammar_masks(masked, mask)
    for i, row in masked:
        if row.allowed_bits is not None:
            mask[i] &= row.allowed_bits
        if i in errors:
            row.request.failure = str(errors[i])
        elif not mask[i].any():
            row.request.failure = "no token is allowed by both grammar and allowed_token_ids"
        else:
            continue
        mask[i] = -1
    return mask


def _fill_grammar_masks(
    masked: Sequence[tuple[int, RowEdits]], mask: np.ndarray
) -> dict[int, ValueError]:
    """Writes the masks of the rows with grammars; errors by row."""
    by_filler: dict[MaskFiller, tuple[list[GrammarState], list[int]]] = {}
    for i, row in masked:
        grammar = row.request.grammar
        if grammar is not None:
            states, rows = by_filler.setdefault(grammar.filler, ([], []))
            states.append(grammar)
            rows.append(i)
    errors: dict[int, ValueError] = {}
    for filler, (states, rows) in by_filler.items():
        errors.update(filler.fill_masks(states, rows, mask))
    return errors


def apply_mask(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """logits [R, V] with minus infinity where the bit in mask int32 [R, W] is 0."""
    rows, size = logits.shape
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(rows, -1)[:, :size]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def apply_entries(num_entries: int, logits: jax.Array, packed: jax.Array) -> jax.Array:
    """logits float32 [R, V] with the packed entries applied: addition, then penalties.

    The repetition penalty (CTRL, arXiv 1909.05858) divides positive and multiplies negative logits
    of tokens seen; frequency and presence penalties are subtracted, per occurrence in the output
    and once.
    """
    split = ENTRY_FIELDS * num_entries
    rows, tokens, add, counts, seen = packed[:split].reshape(ENTRY_FIELDS, num_entries)
    row_fields = lax.bitcast_convert_type(packed[split:], jnp.float32)
    repetition, frequency, presence = row_fields.reshape(ROW_FIELDS, -1)[:, rows]
    values = logits.at[rows, tokens].get(mode="clip")
    values = values + lax.bitcast_convert_type(add, jnp.float32)
    # A quotient by one row's scalar would be compiled as a product with its inverse.
    factor = jnp.where(values > 0, 1.0 / repetition, repetition)
    repeated = values * factor
    values = jnp.where(seen == 1, repeated, values)
    counts = counts.astype(jnp.float32)
    # Which of the products a compiler fuses into a subtraction depends on the number of entries.
    values, by_count, by_presence = lax.optimization_barrier(
        (values, frequency * counts, presence * (counts > 0))
    )
    values = values - by_count - by_presence
    return logits.at[rows, tokens].set(values, mode="drop")
