"""Draft trees from the n-gram trie, for a whole batch at once and without a loop over tree levels.

A request's candidates stand in fixed columns:
- firsts: children of the root, from the suffixes of the text that the trie knows (anchors);
- main: how the text went on after the best first, read off the token log and, where that stream
  ends, taken up again at the longest known suffix of text plus draft;
- side: the same for the next few firsts, without taking up again;
- forks: other children of the trie nodes that the main chain passes.
The best N - 1 columns, a set closed under ancestors, become the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.ngram_candidates import Candidates, Draft, Layout, pick
from sgl_spec.speculative.ngram_scores import UNKNOWN_SHARE, AcceptanceModel
from sgl_spec.speculative.trie import LISTED, PLACES, NgramTrie

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_SIDES = 1
_FORKS = 2
_RESUME_FROM = 8  # length of the match from which an ended chain is worth taking up again
_ORDER_BITS = 20


@dataclass(frozen=True, slots=True)
class Texts:
    """What the trees of B requests continue.

    rows: [B] request rows. windows: [B, depth - 1] last tokens of each text, newest first. known:
    [B] how many of them exist. tokens: [num_rows, width] all texts. lengths: [B] of the texts.
    logged: [B] leading tokens that are in the log. tails: [B] log position of the last of these, -1
    if it is not known. max_nodes: [B] most nodes of the tree. probes: [B] whether the main chain's
    scores are raised.
    """

    rows: Ints
    windows: Ints32
    known: Ints
    tokens: Ints32
    lengths: Ints
    logged: Ints
    tails: Ints
    max_nodes: Ints
    probes: Bools


@dataclass(frozen=True, slots=True)
class _Firsts:
    """Children of the roots, flat, in order of (request, preference).

    text: request index. place: rank within the request. node: trie node. anchor: tokens of the
    match.
    """

    text: Ints
    place: Ints
    node: Ints
    token: Ints
    anchor: Ints
    bucket: Ints
    chance: Floats


@dataclass(slots=True)
class _Chains:
    """[B, 1 + sides, steps] tokens that follow each other, the first first. lengths: [B, 1 + sides]
    tokens in use. anchor: [B, 1 + sides] length of the match that the chain continues. match: [B,
    steps] length of the match that each token of the main chain continues."""

    tokens: Ints
    lengths: Ints
    anchor: Ints
    match: Ints


class TreeBuilder:
    """Builds the trees. breadth: [depth] most children followed from an n-gram of i tokens.
    by_chance: nodes are taken by falling probability instead of breadth first, longest match
    first."""

    def __init__(
        self, trie: NgramTrie, model: AcceptanceModel, nodes: int, breadth: Ints, *, by_chance: bool
    ) -> None:
        assert nodes >= 2
        self._trie = trie
        self._model = model
        self._breadth = np.minimum(breadth, LISTED)
        self._by_chance = by_chance
        self._layout = Layout(nodes, _SIDES, _FORKS)

    def build(self, texts: Texts) -> Draft:
        """One tree per request."""
        suffixes, children = self._known_suffixes(texts.windows, texts.known)
        firsts = self._find_firsts(texts, suffixes, children)
        table = Candidates(texts.rows.size, self._layout)
        at = firsts.text * self._layout.firsts + firsts.place
        table.put_firsts(at, firsts.token, firsts.bucket, firsts.chance)
        if self._layout.steps and at.size:
            chains = self._follow(texts, firsts)
            self._judge_main(texts, chains, table)
            self._judge_sides(texts, chains, table)
        table.probe(texts.probes)
        roots = texts.windows[:, 0].astype(np.int64)
        return table.select(roots, texts.max_nodes, suffixes)

    # ---- children of the root

    def _find_firsts(self, texts: Texts, suffixes: Ints, children: Ints) -> _Firsts:
        trie, nodes = self._trie, self._trie.nodes
        text, length, anchor = self._anchors(suffixes, children)
        kids = nodes.children(anchor)
        spot = np.flatnonzero(kids)
        of, kid = spot // PLACES, kids.reshape(-1).take(spot)
        worth = nodes.rank_value(kid).astype(np.int64)
        order = np.argsort((of << 32) - worth)
        of, kid = of.take(order), kid.take(order)
        rank = np.arange(of.size) - np.searchsorted(of, of)
        wanted = np.flatnonzero(rank < self._breadth.take(length.take(of)))
        of, kid, rank = of.take(wanted), kid.take(wanted), rank.take(wanted)
        token = trie.tokens(kid).astype(np.int64)
        kept = _first_of_each(text.take(of), token)
        of, kid, rank, token = of.take(kept), kid.take(kept), rank.take(kept), token.take(kept)
        text, length, anchor = text.take(of), length.take(of), anchor.take(of)
        longest = length.take(np.searchsorted(text, text))
        times = np.maximum(self._times(anchor) - 1, 1)  # without the text's own end
        share = np.minimum(trie.counts(kid) / times, 1.0)
        bucket = self._model.bucket(length, share, times, rank + (length < longest))
        chance = self._model.probability(bucket, texts.rows.take(text))
        firsts = [text, kid, token, length, bucket]
        if self._by_chance:
            best = np.argsort(text + (1.0 - chance) / 2, kind="stable")
            firsts, chance = [part.take(best) for part in firsts], chance.take(best)
        place = np.arange(of.size) - np.searchsorted(firsts[0], firsts[0])
        fits = np.flatnonzero(place < self._layout.firsts)
        text, kid, token, length, bucket = (part.take(fits) for part in firsts)
        return _Firsts(text, place.take(fits), kid, token, length, bucket, chance.take(fits))

    def _anchors(self, suffixes: Ints, children: Ints) -> tuple[Ints, Ints, Ints]:
        """Text, length and node of the known suffixes with children, longest first in each text.

        A suffix whose children the next longer one is sure to list is left out.
        """
        longest = self._trie.depth - 1
        has = children > 0
        lists_all = children[:, 1:] <= self._breadth[2:]
        has[:, :-1] &= ~(has[:, 1:] & lists_all & (children[:, :-1] == children[:, 1:]))
        at = np.flatnonzero(has[:, ::-1])
        text, length = at // longest, longest - at % longest
        return text, length, suffixes.reshape(-1).take(text * longest + length - 1)

    def _known_suffixes(self, windows: Ints | Ints32, known: Ints) -> tuple[Ints, Ints]:
        """[m, depth - 1] nodes of the last 1, 2, ... tokens (0: none) and their numbers of
        children."""
        hash_of = self._trie.hash
        ids = self._trie.find(hash_of.suffixes(hash_of.tokens(windows)))
        ids *= np.arange(ids.shape[1]) < known[:, None]
        return ids, self._num_children(ids)

    def _num_children(self, ids: Ints) -> Ints:
        """Children of nodes of any shape; none where there is no node."""
        children = self._trie.nodes.num_children(ids.reshape(-1)).reshape(ids.shape)
        return children.astype(np.int64) * (ids > 0)

    def _times(self, ids: Ints) -> Ints:
        """Occurrences of nodes of any shape."""
        return self._trie.counts(ids.reshape(-1)).reshape(ids.shape).astype(np.int64)

    # ---- chains

    def _follow(self, texts: Texts, firsts: _Firsts) -> _Chains:
        """Chains that start with the first few firsts of each text."""
        batch, ways, steps = texts.rows.size, 1 + self._layout.sides, self._layout.steps + 1
        lead = np.flatnonzero(firsts.place < ways)
        at = firsts.text.take(lead) * ways + firsts.place.take(lead)
        start = np.zeros(batch * ways, np.int64)
        start[at] = self._trie.last(firsts.node.take(lead))
        tokens = np.zeros((batch * ways, steps), np.int64)
        where = np.zeros((batch * ways, steps), np.int64)
        tokens[at, 0], where[:, 0] = firsts.token.take(lead), start
        tokens[:, 1:], where[:, 1:] = self._trie.log.follow(start, steps - 1)
        lengths = (where > 0).sum(axis=1)
        _repeat_own_end(tokens, where, lengths, texts, ways)
        anchor = np.zeros((batch, ways), np.int64)
        anchor.reshape(-1)[at] = firsts.anchor.take(lead)
        chains = _Chains(
            tokens.reshape(batch, ways, steps),
            lengths.reshape(batch, ways),
            anchor,
            anchor[:, :1] + np.arange(steps),
        )
        self._resume(texts, chains)
        return chains

    def _resume(self, texts: Texts, chains: _Chains) -> None:
        """Go on with main chains that ended early, from the longest suffix that has a child."""
        steps = chains.match.shape[1]
        length = chains.lengths[:, 0]
        ended = (length > 0) & (length < steps)
        short = np.flatnonzero(ended & (chains.anchor[:, 0] >= _RESUME_FROM))
        if not short.size:
            return
        length = chains.lengths[short, 0]
        context = _chronological(texts.windows[short], chains.tokens[short, 0])
        span = texts.windows.shape[1]
        back = (span + length - 1)[:, None] - np.arange(span)
        windows = pick(context, back)
        ids, children = self._known_suffixes(windows, np.minimum(texts.known[short] + length, span))
        longest = span - np.argmax((children > 0)[:, ::-1], axis=1)
        can = (children > 0).any(axis=1)
        short, length, longest = short[can], length[can], longest[can]
        kids = self._trie.nodes.children(ids[can, longest - 1])
        worth = self._trie.nodes.rank_value(kids.reshape(-1)).reshape(kids.shape) * (kids > 0)
        kid = kids[np.arange(short.size), np.argmax(worth, axis=1)]
        start = self._trie.last(kid).astype(np.int64)
        later, where = self._trie.log.follow(start, steps - 1)
        offset = np.arange(steps)[None, :] - length[:, None]  # of each column from the new start
        fresh = np.concatenate([self._trie.tokens(kid)[:, None], later], axis=1)
        fresh = pick(fresh, np.maximum(offset, 0))
        chains.tokens[short, 0] = np.where(offset >= 0, fresh, chains.tokens[short, 0])
        chains.match[short] = np.where(offset >= 0, longest[:, None] + offset, chains.match[short])
        chains.lengths[short, 0] = np.minimum(steps, length + 1 + (where > 0).sum(axis=1))

    # ---- judgement

    def _judge_main(self, texts: Texts, chains: _Chains, table: Candidates) -> None:
        """Fill in the main chains and their forks."""
        steps = self._layout.steps
        tokens, lengths = chains.tokens[:, 0], chains.lengths[:, :1]
        match = chains.match[:, 1:]
        reached = np.arange(steps) < lengths  # chain token i is there to be continued
        ids = self._states(texts, tokens, match) * reached
        children, times = self._num_children(ids), self._times(ids)
        share = np.where(children == 1, 1.0, UNKNOWN_SHARE)
        open_at = np.flatnonzero(children > 1)
        fork, fork_share = self._forks(open_at, ids, tokens[:, 1:], match, times, share)
        bucket = self._model.bucket(match, share, times, np.zeros_like(match))
        chance = self._model.probability(bucket, texts.rows[:, None])
        table.put_main(tokens[:, 1:], bucket, chance, np.arange(1, steps + 1) < lengths)
        if open_at.size:
            matches = match.reshape(-1).take(open_at)[:, None]
            seen = times.reshape(-1).take(open_at)[:, None]
            bucket = self._model.bucket(matches, fork_share, seen, np.ones_like(fork))
            rows = texts.rows.take(open_at // steps)[:, None]
            chance = self._model.probability(bucket, rows)
            table.put_forks(open_at, fork, bucket, chance, fork_share > 0)

    def _states(self, texts: Texts, tokens: Ints, match: Ints) -> Ints:
        """[B, steps] trie node of the match that ends at each of the first `steps` chain tokens."""
        span = texts.windows.shape[1]
        context = _chronological(texts.windows, tokens[:, :-1])
        ends = np.arange(span, context.shape[1])
        raw = self._trie.hash.spans(self._trie.hash.tokens(context), ends, np.minimum(match, span))
        return self._trie.find(raw)

    def _forks(
        self, at: Ints, ids: Ints, following: Ints, match: Ints, times: Ints, share: Floats
    ) -> tuple[Ints, Floats]:
        """Best other children of the states `at` (flat) and their shares, each [m, _FORKS].

        Sets `share` of the chain's own next token in place. A fork with share 0 is none.
        """
        if not at.size:
            return np.zeros((0, _FORKS), np.int64), np.zeros((0, _FORKS))
        kids = self._trie.nodes.children(ids.reshape(-1).take(at))
        flat = kids.reshape(-1)
        token = self._trie.tokens(flat).reshape(kids.shape).astype(np.int64)
        part = self._trie.counts(flat).reshape(kids.shape) / times.reshape(-1).take(at)[:, None]
        part = np.minimum(part, 1.0) * (kids > 0)
        own = (token == following.reshape(-1).take(at)[:, None]) & (kids > 0)
        share.reshape(-1)[at] = np.where(own.any(axis=1), (part * own).sum(axis=1), UNKNOWN_SHARE)
        worth = self._trie.nodes.rank_value(flat).reshape(kids.shape) * ((kids > 0) & ~own)
        best = np.argsort(-worth, axis=1)[:, :_FORKS]
        room = self._breadth.take(np.minimum(match.reshape(-1).take(at), self._breadth.size - 1))
        allowed = np.arange(1, 1 + _FORKS) < room[:, None]
        allowed &= pick(worth, best) > 0
        shares = pick(part, best) * allowed
        return pick(token, best), shares

    def _judge_sides(self, texts: Texts, chains: _Chains, table: Candidates) -> None:
        """Fill in the side chains; what the trie thinks of their states is not looked up."""
        steps = self._layout.steps
        match = chains.anchor[:, 1:, None] + np.arange(1, steps + 1)
        goes_on = np.arange(1, steps + 1) < chains.lengths[:, 1:, None]
        bucket = self._model.bucket_unseen(match)
        chance = self._model.probability(bucket, texts.rows[:, None, None])
        table.put_sides(chains.tokens[:, 1:, 1:], bucket, chance, goes_on)


def _first_of_each(text: Ints, token: Ints) -> Ints:
    """Ascending indices of the first occurrence of every (text, token)."""
    key = (text << (31 + _ORDER_BITS)) | (token << _ORDER_BITS) | np.arange(text.size)
    key.sort()
    group = key >> _ORDER_BITS
    new = np.ones(key.size, np.bool_)
    np.not_equal(group[1:], group[:-1], out=new[1:])
    return np.sort(key[new] & ((1 << _ORDER_BITS) - 1))


def _chronological(windows: Ints32, tokens: Ints) -> Ints:
    """[B, w] last tokens of texts, newest first, then [B, n] tokens after them -> [B, w + n]."""
    return np.concatenate([windows[:, ::-1], tokens], axis=1)


def _repeat_own_end(tokens: Ints, where: Ints, lengths: Ints, texts: Texts, ways: int) -> None:
    """A chain that runs into the end of its own text goes on with what is not in the log yet, then
    with its own beginning, in place.

    where: [m, steps] log positions of the chain's tokens, `ways` chains a text.
    """
    at_end = (where == np.repeat(texts.tails, ways)[:, None]) & (where > 0)
    loops = np.flatnonzero(at_end.any(axis=1))
    if not loops.size:
        return
    steps, text = tokens.shape[1], loops // ways
    seen = np.argmax(at_end[loops], axis=1)[:, None] + 1  # chain tokens up to the log's end
    logged = texts.logged.take(text)[:, None]
    place = np.arange(steps) % (seen + texts.lengths.take(text)[:, None] - logged)
    again = pick(tokens[loops], place)
    at = logged + np.maximum(place - seen, 0)
    later = texts.tokens[texts.rows.take(text)[:, None], np.minimum(at, texts.tokens.shape[1] - 1)]
    tokens[loops] = np.where(place < seen, again, later)
    lengths[loops] = steps
