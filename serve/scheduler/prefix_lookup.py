"""The scheduler's use of the prefix cache: lookup, fetch and insertion. No torch, no asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memory.kv_memory import KVMemory
from memory.pages.kv_range import PrefixHit
from memory.prefix.block_recorder import BlockRecorder
from memory.prefix.index import PrefixHasher
from memory.prefix.sequence_names import SequenceNames
from serve.request import Request
from serve.scheduler.sequence import PeerWait, Sequence

# How long a sequence waits for a page store that does not answer.
_FETCH_LIMIT_S = 2.0
# For a prompt that a peer computes: how soon peers are asked again, about how many further pages,
# how long they may not know of it, and the shortest time after a page in which the next must come;
# where no step was measured yet.
_ASK_AGAIN_S = 0.01
_ASKED_PAGES = 128
_UNKNOWN_S = 0.25
_STALLED_S = 1.0
_STALLED_UNKNOWN_S = 5.0


class PrefixLookup:
    """Hashes the pages of sequences, looks them up, and inserts complete pages."""

    def __init__(
        self,
        kv: KVMemory,
        hasher: PrefixHasher | None,
        prefill_seconds: Callable[[int, int], float],
    ) -> None:
        """hasher: hashes pages; None: nothing is looked up or inserted. prefill_seconds(n, k): the
        seconds to compute n tokens of which k are cached; 0 if unknown."""
        self._kv = kv
        self._hasher = hasher
        self._prefill_seconds = prefill_seconds
        self._fetch_deadline_s = 0.0
        self._asking: Sequence | None = None  # for which the store was asked which pages it has
        self._is_turn_due = False  # a sequence waits for one that takes turns at the store
        self.recorder: BlockRecorder | None = None
        """Notes the tokens of cached pages, for those who follow the cache from outside."""
        self.names: SequenceNames | None = None
        """Takes note of the pages of sequences, for peers."""

    @property
    def is_on(self) -> bool:
        return self._hasher is not None

    def page_keys(self, request: Request) -> list[bytes]:
        """Returns the keys of the pages that the prompt fills. Any thread may call it."""
        keys: list[bytes] = []
        if self._hasher is not None:
            self._hasher.extend(keys, request.prompt_token_ids, request.params.cache_salt)
        return keys

    def num_missing_rows(self, request: Request, page_keys: list[bytes]) -> int:
        """Returns the rows of a prompt with these keys that are not cached: at least one, or 0 for
        an empty prompt. Any thread may call it."""
        num_tokens = len(request.prompt_token_ids)
        if request.reads_prompt:
            return num_tokens
        return max(num_tokens - self._kv.num_cached_tokens(page_keys), min(1, num_tokens))

    def is_being_computed(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Returns whether one of `others`, which run, is computing the next page it lacks."""
        if self._hasher is None:
            return False
        if sequence.reads_prompt:  # only rows of its own request help it
            others = [other for other in others if other.request is sequence.request]
        self._extend_keys(sequence)
        keys = sequence.page_keys
        for other in others:
            if other.kv_range is None:
                continue  # it has just been preempted
            # A key covers all tokens before it, so equal keys mean equal prefixes.
            page = other.kv_range.num_offered
            key = keys[page : page + 1]
            is_shared = key and key == other.page_keys[page : page + 1]
            if is_shared and not self._kv.prefixes.is_cached(key[0]):
                return True
        return False

    def is_fetching(self, sequence: Sequence, now_s: float) -> bool:
        """Returns whether the page store is loading pages of the sequence. Requests them once, when
        memory has room, and stops waiting for a store that does not answer."""
        if self._hasher is None or not self._kv.prefixes.has_store or sequence.reads_prompt:
            return False
        if self._kv.prefixes.is_fetching:
            is_own = sequence.is_fetch_requested or self._asking is sequence
            self._is_turn_due = not is_own
            return now_s < self._fetch_deadline_s
        if not sequence.is_fetch_requested and self._kv.can_fit(
            sequence.num_tokens, hit=self.match(sequence)
        ):
            if self.recorder is not None:
                self.recorder.expect_loads(*_named_tokens(sequence))
            self._fetch(sequence, sequence.page_keys, now_s)
            sequence.is_fetch_requested = self._asking is None
        return self._kv.prefixes.is_fetching

    def _fetch(self, sequence: Sequence, keys: list[bytes], now_s: float) -> bool:
        is_begun = self._kv.fetch(keys, self._prefill_seconds)
        self._note_question(sequence, now_s)
        return is_begun

    def _note_question(self, sequence: Sequence, now_s: float) -> None:
        self._asking = sequence if self._kv.prefixes.is_asking else None
        self._fetch_deadline_s = now_s + _FETCH_LIMIT_S

    def is_awaited(self, sequence: Sequence, now_s: float) -> bool:
        """Returns whether a waiting sequence waits for pages that a peer computes, as its request
        says. Loads those that are complete, so that most are here when the last one is."""
        wait = sequence.peer_wait
        if wait is None:
            return False
        prefixes = self._kv.prefixes
        if self._hasher is not None and prefixes.has_store and not sequence.reads_prompt:
            prefixes.question.is_awaited = True
            if self._waits_on(sequence, wait, now_s):
                return True
            prefixes.question.is_awaited = False
        # what has not come is computed here
        sequence.expected_s = self._prefill_seconds(sequence.num_tokens, wait.num_cached)
        sequence.peer_wait = None
        self.queued(sequence)
        return False

    def _waits_on(self, sequence: Sequence, wait: PeerWait, now_s: float) -> bool:
        prefixes = self._kv.prefixes
        if wait.began_s is None:
            self._extend_keys(sequence)
            wait.began_s = now_s
            self._extend_wait(sequence, wait, now_s)
        if prefixes.is_fetching or now_s < wait.asks_s:
            return now_s < wait.until_s
        is_asked = self._asking is sequence
        if self._asking is not None and not is_asked and now_s < self._fetch_deadline_s:
            return now_s < wait.until_s  # another one has asked, and uses the answer first
        if self._is_turn_due:
            self._is_turn_due = False
            wait.asks_s = now_s + _ASK_AGAIN_S
            return True
        keys, first = sequence.page_keys, self._first_missing(sequence, wait, now_s)
        if first == len(keys) or now_s >= wait.until_s:
            return False
        end = first + _ASKED_PAGES
        missing = [key for key in keys[first:end] if not prefixes.is_cached(key)]
        if not is_asked and prefixes.question.ask(missing):
            self._note_question(sequence, now_s)
            return True
        # Fetching looks at the whole prompt, so it is done only if there is something to load.
        if any(map(prefixes.is_stored, missing)):
            if self._fetch(sequence, keys[:end], now_s):
                wait.is_changed = True
                return True
            if prefixes.is_stored(keys[first]):  # computing it is faster, or memory has no room
                return False
        # The answer is used up, unless other pages are missing by now.
        elif is_asked and prefixes.question.ask(missing):
            self._note_question(sequence, now_s)
            return True
        self._asking = None
        wait.asks_s = now_s + _ASK_AGAIN_S
        is_coming = any(map(prefixes.question.is_coming, missing))
        wait.was_coming |= is_coming
        return is_coming or (not wait.was_coming and now_s < wait.began_s + _UNKNOWN_S)

    def _first_missing(self, sequence: Sequence, wait: PeerWait, now_s: float) -> int:
        """Returns the number of the first page that the sequence lacks, and lets it wait on if a
        page has come. Looks at the whole prompt, which takes milliseconds if it is long, only if
        pages have come or gone."""
        keys, is_cached, first = sequence.page_keys, self._kv.prefixes.is_cached, wait.first_missing
        is_gone = first > 0 and not is_cached(keys[first - 1])
        if not (wait.is_changed or is_gone or (first < len(keys) and is_cached(keys[first]))):
            return first
        num_cached = self._kv.num_cached_tokens(keys)
        if num_cached > wait.num_cached:
            wait.num_cached = num_cached
            self._extend_wait(sequence, wait, now_s)
        first = 0 if is_gone else first
        while first < len(keys) and (
            self._kv.page_end(first) <= num_cached or is_cached(keys[first])
        ):
            first += 1
        wait.first_missing, wait.is_changed = first, False
        return first

    def _extend_wait(self, sequence: Sequence, wait: PeerWait, now_s: float) -> None:
        """Sets the time of which the next page must come: it is in proportion to what computing the
        rest here takes, so that waiting in vain is not much worse than not waiting."""
        rest_s = self._prefill_seconds(sequence.num_tokens, wait.num_cached)
        wait.until_s = now_s + (max(_STALLED_S, 2.0 * rest_s) if rest_s else _STALLED_UNKNOWN_S)

    def most_shared(self, sequence: Sequence) -> int:
        """Returns how many of its tokens may come from the prefix cache: at least one is left to
        compute."""
        return sequence.num_tokens - 1

    def match(self, sequence: Sequence) -> PrefixHit | None:
        """Returns the prefix hit, or None if there is none or computing it takes less time than
        mapping it. At least one token is left to compute."""
        if self._hasher is None or sequence.reads_prompt:
            return None
        self._extend_keys(sequence)
        hit = self._kv.match(sequence.page_keys, self.most_shared(sequence))
        if hit is None:
            return None
        compute_s = self._prefill_seconds(hit.num_tokens, 0)
        return None if 0.0 < compute_s < self._kv.map_seconds(hit) else hit

    def open(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        """Opens a range for the sequence, with the pages of the hit."""
        sequence.kv_range = self._kv.open(sequence.num_tokens, hit)
        sequence.num_computed_tokens = num_hit = hit.num_tokens if hit is not None else 0
        stats = self._kv.prefixes.stats
        stats.num_asked_tokens += sequence.num_tokens
        stats.num_hit_tokens += num_hit
        if sequence.first_scheduled_s is None:
            sequence.num_cached_tokens = num_hit

    def insert(self, sequence: Sequence, num_computed: int) -> None:
        """Inserts the pages that num_computed tokens complete into the prefix cache."""
        if self._hasher is None or sequence.kv_range is None:
            return
        self._extend_keys(sequence, num_computed)
        if self.recorder is not None:
            self.recorder.begin(*_named_tokens(sequence))
        self._kv.insert_prefix(sequence.kv_range, sequence.page_keys, num_computed)
        if self.recorder is not None:
            self.recorder.end()
        if self.names is not None:
            self.names.computed(sequence, num_computed)
        sequence.next_cacheable_at = self._kv.page_end(sequence.kv_range.num_offered)

    def queued(self, sequence: Sequence) -> None:
        """Takes note of a new sequence. One that waits for a peer counts when that has ended, so
        that no two engines wait for each other, and that others here are not predicted to wait for
        what is computed elsewhere."""
        if sequence.peer_wait is not None:
            num_tokens = sequence.num_tokens
            sequence.expected_s = self._prefill_seconds(num_tokens, max(0, num_tokens - 1))
        elif self.names is not None:
            self.names.queued(sequence, sequence.page_keys, sequence.request.request_id)

    def ended(self, sequence: Sequence) -> None:
        """Takes note of a sequence that has ended, for whatever reason."""
        if self._asking is sequence:
            self._asking = None
        if self.names is not None:
            self.names.ended(sequence)

    def _extend_keys(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Extends page_keys over num_tokens known tokens; None: all, as for a waiting sequence."""
        assert self._hasher is not None
        salt = sequence.request.params.cache_salt
        self._hasher.extend(sequence.page_keys, sequence.token_ids, salt, num_tokens)


def _named_tokens(sequence: Sequence) -> tuple[list[int], list[bytes], str | None]:
    """Returns the tokens of a sequence, the keys of its pages and the salt of these keys."""
    return sequence.token_ids, sequence.page_keys, sequence.request.params.cache_salt
