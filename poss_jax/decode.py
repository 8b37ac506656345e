"""One round = draft, verify, commit; and the jitted loop of rounds. Plain decoding is a round without a draft.

With n committed tokens, the root is token n: chosen by the target, not yet fed to it. `State.tokens` holds all of
them, `State.length` = n + 1. A round feeds root and drafted nodes to the target in one pass and commits the root
and the accepted nodes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax import cache, draft, llama, tree, verify
from poss_jax.attention import KERNEL_TILE, KeyValues
from poss_jax.config import DraftConfig, TargetConfig
from poss_jax.sampling import Sampling
from poss_jax.tree import ROOT_ONLY, Tree, TreeShape


class Layout(NamedTuple):
    """What a kernel of attention would otherwise copy its inputs for, in every layer.

    nodes: a multiple of them in a tree. stacked: the caches of all layers in one array.
    """

    nodes: int
    stacked: bool


LAYOUTS = {"plain": Layout(1, stacked=False), "mosaic": Layout(KERNEL_TILE, stacked=True)}
RUNNING, STOPPED_AT_EOS, STOPPED_AT_LIMIT, STOPPED_BY_HOST = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in a decoding program. Without a draft the tree is the root alone."""

    target: TargetConfig
    draft: DraftConfig | None = None
    tree: TreeShape = ROOT_ONLY
    sampling: Sampling = Sampling()
    kernel: str = "plain"  # of attention in rounds, see `attention`

    @classmethod
    def create(
        cls,
        target: TargetConfig,
        draft_config: DraftConfig | None,
        shape: TreeShape,
        sampling: Sampling,
        kernel: str = "plain",
    ) -> "Plan":
        """Clamps the tree to what can be filled; one without levels needs no drafter."""
        shape = shape.clamp(target.vocab_size)
        if draft_config is None or shape.levels == 0:
            return cls(target, None, ROOT_ONLY, sampling, kernel)
        return cls(target, draft_config, shape, sampling, kernel)

    @property
    def slack(self) -> int:
        """Slots beyond the most tokens that are needed: a round writes levels + 1 rows, accepted or not."""
        return self.tree.levels + 1

    @property
    def of_prompts(self) -> "Plan":
        """What the prompts' pass depends on: the same one for all trees that run as many specialists, the smallest.

        Example: spans (3, 3) and 6 levels give a chain of 4, the fewest that the second specialist has a part in.
        """
        if self.draft is None:
            return self
        last = self.draft.specialists_used(self.tree.levels) - 1
        levels = self.draft.starts[last] + 1
        return dataclasses.replace(self, tree=TreeShape(levels, total_nodes=levels + 1, top_k=1))


class Params(NamedTuple):
    """Weights: `target` as in `llama.parameter_specs`; `draft` the `Drafter`'s, with `embed` [v, h] if it has one."""

    target: dict[str, Any]
    draft: dict[str, Any] | None = None


class Round(NamedTuple):
    """What happened in the last round, for traces: the tree, the accepted path and its length, what came next."""

    tree: Tree
    path: jax.Array  # [b, levels + 1] int32
    accept_length: jax.Array  # [b] int32
    next_token: jax.Array  # [b] int32


@struct.dataclass
class State:
    """A batch of sequences being decoded. Rows never read each other."""

    tokens: jax.Array  # [b, slots] int32: prompt, emitted tokens, then zeros or leftovers
    length: jax.Array  # [b] int32: prompt and emitted tokens, the root being the last
    limit: jax.Array  # [b] int32: the length at which a row stops
    stopped: jax.Array  # [b] int32: RUNNING or the reason
    key: jax.Array  # [b] PRNG keys; the randomness of a token is the key folded with its position
    rounds: jax.Array  # [b] int32
    accept_lengths: jax.Array  # [b, slots] int32, the first `rounds` of them
    target_caches: cache.Caches  # of every layer [b, k, slots, d], apart or stacked
    draft_caches: draft.Caches  # one per specialist in use; () without a draft
    features: jax.Array  # [b, levels + 1, h]: features of the tokens committed last, `fresh` of them real
    fresh: jax.Array  # [b] int32
    last_round: Round


def prefill(
    params: Params,
    plan: Plan,
    slots: int,
    prompt: jax.Array,
    prompt_length: jax.Array,
    limit: jax.Array,
    key: jax.Array,
    eos_ids: jax.Array,
) -> State:
    """Runs the prompts [b, t] (padded on the right to one bucket) and chooses the first new token of each.

    `slots` > t; with fewer than the largest limit + `plan.slack`, `decode` stops for want of room and the state must
    `grow`. `limit` [b]: tokens at which a row stops, prompt included; a row whose limit does not exceed its prompt is a
    companion that never runs. `key` [b]: PRNG keys. `eos_ids` [e] int32, padded with -1.
    """
    batch, rows = prompt.shape
    positions = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    lengths = jnp.broadcast_to(prompt_length[:, None], (batch, rows))
    features, new_rows = llama.forward(params.target, plan.target, prompt, positions, lengths, None)
    last_feature = cache.read_rows(features, prompt_length - 1, 1)  # [b, 1, h]
    logits = llama.head(params.target, last_feature)

    def choose_root(logits, key, position):
        return verify.rule_for(plan.sampling)(logits, key, position)(jnp.int32(0), 0)

    root = jax.vmap(choose_root)(logits, key, prompt_length - 1)
    tokens = jnp.zeros((batch, slots), jnp.int32)
    tokens = jax.lax.dynamic_update_slice(tokens, prompt.astype(jnp.int32), (0, 0))
    tokens = cache.write_rows(tokens, root[:, None], prompt_length)
    zeros = jnp.zeros((batch,), jnp.int32)
    first_features, no_round = _before_rounds(plan.tree, last_feature, root)
    state = State(
        tokens=tokens,
        length=prompt_length,
        limit=limit,
        stopped=jnp.where(limit > prompt_length, RUNNING, STOPPED_AT_LIMIT),
        key=key,
        rounds=zeros,
        accept_lengths=jnp.zeros((batch, slots), jnp.int32),
        target_caches=cache.fill(plan.target.block, new_rows, slots, LAYOUTS[plan.kernel].stacked),
        draft_caches=_prefill_draft(params, plan, slots, tokens[:, 1 : rows + 1], features),
        features=first_features,
        fresh=zeros + 1,
        last_round=no_round,
    )
    return _emit(state, zeros + 1, eos_ids)


def jit_prefill(params: Params, plan: Plan, slots: int, *arguments: jax.Array) -> State:
    """`prefill` in two programs, of which the large one serves all trees with the same `Plan.of_prompts`."""
    state = _jit_prefill(params, plan.of_prompts, slots, *arguments)
    return state if plan.of_prompts == plan else fit(state, plan)


def fit(state: State, plan: Plan) -> State:
    """The state after the prompts' pass with room for the tree of `plan`, whatever tree it had room for before. Its
    caches stay where they are.
    """
    features, last_round = _jit_before_rounds(plan.tree, state.features, state.last_round.next_token)
    return state.replace(features=features, last_round=last_round)


def decode(params: Params, plan: Plan, state: State, eos_ids: jax.Array, rounds: jax.Array, ended: jax.Array) -> State:
    """Runs at most `rounds` [] rounds, fewer if every row stops or one has no room for another. `state` is donated and
    updated in place.

    `ended` [b] bool: rows that the host has stopped since, at a stop string say.
    """
    stopped = jnp.where((state.stopped == RUNNING) & ended, STOPPED_BY_HOST, state.stopped)
    state = state.replace(stopped=stopped.astype(jnp.int32))

    def unfinished(carry):
        done, current = carry
        # Rows that have stopped are written to as well: theirs must not be clamped into their tokens.
        room = current.length + plan.slack <= current.tokens.shape[1]
        return (done < rounds) & jnp.any(current.stopped == RUNNING) & jnp.all(room)

    def one_more(carry):
        done, current = carry
        return done + 1, decode_round(params, plan, current, eos_ids)

    return jax.lax.while_loop(unfinished, one_more, (jnp.int32(0), state))[1]


def grow(state: State, slots: int) -> State:
    """The same state with `slots` slots, of which the new ones are empty. Attention over caches costs by the slot, so
    long texts start with few.
    """
    more = slots - state.tokens.shape[1]

    def widen(array: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(array, [(0, more if index == axis else 0) for index in range(array.ndim)])

    caches = (state.target_caches, state.draft_caches)
    target_caches, draft_caches = jax.tree.map(lambda array: widen(array, array.ndim - 2), caches)
    return state.replace(
        tokens=widen(state.tokens, 1),
        accept_lengths=widen(state.accept_lengths, 1),
        target_caches=target_caches,
        draft_caches=draft_caches,
    )


def decode_round(params: Params, plan: Plan, state: State, eos_ids: jax.Array) -> State:
    """Draft, verify, commit. Rows that have stopped are computed along; their tokens, lengths and counts stay, their
    caches and features are of no use any more.
    """
    return verify_round(params, plan, state, *draft_round(params, plan, state), eos_ids)


def draft_round(params: Params, plan: Plan, state: State) -> tuple[Tree, draft.Caches]:
    """The first part of a round: the tree, and the draft caches brought up to date."""
    root = cache.read_rows(state.tokens, state.length - 1, 1)[:, 0]
    if plan.draft is None:
        return tree.root_only(root), ()
    functions = draft.Functions(plan.draft, params.draft, params.target)
    start = state.length - 1 - state.fresh
    following = cache.read_rows(state.tokens, start + 1, plan.slack)  # row i holds token i + 1
    fresh = draft.Fresh(functions.inputs(following, state.features), start, state.fresh)
    return draft.draft_tree(functions, plan.tree, root, fresh, state.draft_caches, plan.kernel)


def verify_round(
    params: Params, plan: Plan, state: State, tree_drafted: Tree, draft_caches: draft.Caches, eos_ids: jax.Array
) -> State:
    """The second part of a round: the target's pass over the tree, what it accepts, and the commit."""
    committed, nodes = state.length - 1, tree_drafted.tokens.shape[1]
    fed = tree.pad(tree_drafted, LAYOUTS[plan.kernel].nodes)
    positions = committed[:, None] + fed.depths
    features, new_rows = llama.forward(
        params.target,
        plan.target,
        fed.tokens,
        positions,
        positions + 1,
        fed.mask,
        state.target_caches,
        committed,
        plan.kernel,
    )
    features = features[:, :nodes]
    logits = llama.head(params.target, features)  # [b, n, v]
    accepted = jax.vmap(_accept, in_axes=(None, 0, 0, 0, 0))(plan, tree_drafted, logits, state.key, committed)
    return _commit(plan, state, tree_drafted, draft_caches, accepted, features, new_rows, eos_ids)


def _accept(plan: Plan, tree_row: Tree, logits: jax.Array, key: jax.Array, position: jax.Array):
    choose = verify.rule_for(plan.sampling)(logits, key, position)
    return verify.walk(tree_row, choose, plan.tree.levels)


def _commit(
    plan: Plan,
    state: State,
    tree_drafted: Tree,
    draft_caches: draft.Caches,
    accepted: verify.Acceptance,
    features: jax.Array,
    new_rows: tuple[KeyValues, ...],
    eos_ids: jax.Array,
) -> State:
    """Keeps the rows of root and accepted nodes, and emits the accepted tokens and the target's next one."""
    committed = state.length - 1
    path = accepted.path  # [b, levels + 1]
    kept = path[:, None, :, None]  # along the row axis of [b, k, n, d]
    # No token is negative, but the compiler does not know that: so the caches are written after they were read,
    # even where the root alone is committed whatever the logits are. Without that order it would copy them.
    start = committed + (accepted.next_token < 0)
    kept_rows = [KeyValues(*(jnp.take_along_axis(part, kept, axis=2) for part in new)) for new in new_rows]
    target_caches = cache.write_layers(state.target_caches, kept_rows, start)
    # Emitted: path tokens below the root, then next_token in the place after the last accepted one.
    emitted = jnp.take_along_axis(tree_drafted.tokens, path, axis=1)[:, 1:]
    emitted = jnp.pad(emitted, ((0, 0), (0, 1)))
    place = jnp.arange(plan.slack)
    emitted = jnp.where(place == accepted.length[:, None], accepted.next_token[:, None], emitted)
    running = state.stopped == RUNNING
    slot = jnp.arange(state.accept_lengths.shape[1])
    this_round = running[:, None] & (slot == state.rounds[:, None])
    state = state.replace(
        tokens=cache.write_rows(state.tokens, emitted, state.length),
        rounds=state.rounds + running,
        accept_lengths=jnp.where(this_round, accepted.length[:, None], state.accept_lengths),
        target_caches=target_caches,
        draft_caches=draft_caches,
        features=jnp.take_along_axis(features, path[..., None], axis=1),
        fresh=jnp.where(running, accepted.length + 1, state.fresh),
        last_round=Round(tree_drafted, path, accepted.length, accepted.next_token),
    )
    return _emit(state, accepted.length + 1, eos_ids)


def _emit(state: State, count: jax.Array, eos_ids: jax.Array) -> State:
    """Lengthens running rows by `count` [b] tokens that are already written, cut at the first EOS or the limit."""
    slots = jnp.arange(state.tokens.shape[1])
    new = (slots >= state.length[:, None]) & (slots < (state.length + count)[:, None])
    is_eos = jnp.any(state.tokens[..., None] == eos_ids, axis=-1) & new
    after_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, state.length + count)
    length = jnp.minimum(after_eos, state.limit)
    ended = jnp.any(is_eos & (slots < length[:, None]), axis=1)
    stopped = jnp.where(ended, STOPPED_AT_EOS, jnp.where(length >= state.limit, STOPPED_AT_LIMIT, RUNNING))
    running = state.stopped == RUNNING
    return state.replace(
        length=jnp.where(running, length, state.length).astype(jnp.int32),
        stopped=jnp.where(running, stopped, state.stopped).astype(jnp.int32),
    )


def _prefill_draft(params: Params, plan: Plan, slots: int, following: jax.Array, features: jax.Array):
    if plan.draft is None:
        return ()
    functions = draft.Functions(plan.draft, params.draft, params.target)
    used = plan.draft.specialists_used(plan.tree.levels)
    empty = tuple(cache.empty(plan.draft.block, following.shape[0], slots, features.dtype) for _ in range(used))
    return draft.fill_prefix(functions, following, features, empty)


def _before_rounds(shape: TreeShape, features: jax.Array, root: jax.Array) -> tuple[jax.Array, Round]:
    """`State.features`, of which the first is real, and `State.last_round`, of which the root [b] is."""
    batch, nodes = *root.shape, shape.total_nodes
    zeros = jnp.zeros((batch, nodes), jnp.int32)
    no_tree = Tree(zeros, zeros, zeros, zeros.astype(jnp.float32), jnp.zeros((batch, nodes, nodes), bool))
    features = jnp.pad(features[:, :1], ((0, 0), (0, shape.levels), (0, 0)))  # [b, levels + 1, h]
    path, accept_length = jnp.zeros((batch, shape.levels + 1), jnp.int32), jnp.zeros((batch,), jnp.int32)
    return features, Round(no_tree, path, accept_length, root)


_jit_prefill = jax.jit(prefill, static_argnames=("plan", "slots"))
_jit_before_rounds = jax.jit(_before_rounds, static_argnames=("shape",))
jit_grow = jax.jit(grow, static_argnames=("slots",))
jit_decode = jax.jit(decode, static_argnames=("plan",), donate_argnames=("state",))
