"""Seeded faults: each must make the paper-GPU tests fail. Run by tests/test_mutants.py."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MEMORY, SCHEDULER = "nanovllm/kv/memory.py", "nanovllm/sched/scheduler.py"
POLICY, TAILS = "nanovllm/sched/policy.py", "nanovllm/sched/tails.py"
PAPER = "tests/paper_gpu.py"

MUTANTS = [
    Mutant("page hash ignores its parent", MEMORY, "sha256(parent + tok", "sha256(tok"),
    Mutant("salt is ignored", MEMORY, '"little") + raw)', '"little"))'),
    Mutant("no token left to compute", MEMORY, "range((len(tokens) - 1) // size):", "range(len(tokens) // size):"),
    Mutant("cached page not held on admission", MEMORY, "            self.pool.hold(page)\n", "            pass\n"),
    Mutant("pages stay held when admission fails", MEMORY, "            self._drop(holding.pages)\n            return None", "            return None"),
    Mutant("evicted page stays findable", MEMORY, "        del self._page_of[self._key_of.pop(page)]", "        self._key_of.pop(page)"),
    Mutant("hybrid hit without a checkpoint", MEMORY, "if not self.hybrid or parent in self._checkpoint_of:", "if True:"),
    Mutant("checkpoint findable in the plan that writes it", MEMORY, "        self._unpublished[key] = checkpoint", "        self._checkpoint_of[key] = checkpoint"),
    Mutant("restore reads the newest checkpoint", MEMORY, "checkpoint = self._checkpoint_of[holding.keys[-1]]", "checkpoint = next(reversed(self._checkpoint_of.values()))"),
    Mutant("checkpoint named after a shorter prefix", MEMORY, "for i in range(known * size, end, size):", "for i in range(known * size, end - size, size):"),
    Mutant("prefix: false still commits and finds", MEMORY, "// size if self.prefix else 0\n", "// size\n"),
    Mutant("pages findable in the plan that writes them", SCHEDULER, "        self._planned[request.slot] = end\n        self._longest = max(self._longest, end)\n", "        self._planned[request.slot] = end\n        self._longest = max(self._longest, end)\n        self.memory.commit(request.id, request.tokens, end)\n"),
    Mutant("chunk jumps over the checkpoint boundary", SCHEDULER, "min(boundary if done < boundary else until,", "min(until,"),
    Mutant("re-admitted before its token arrived", SCHEDULER, "            if request.num_in_flight:\n                return", "            if False:\n                return"),
    Mutant("surplus token of a finished request delivered", SCHEDULER, "if token < 0 or request.finish is not None:", "if token < 0:"),
    Mutant("the most urgent is preempted first", SCHEDULER, "(victim := self._running.last)", "(victim := self._running.first)"),
    Mutant("commit covers a token no step has computed", SCHEDULER, "len(request.tokens) - 1)\n        return self._end", "len(request.tokens))\n        return self._end"),
    Mutant("refused drafts still count as computed", SCHEDULER, "self._planned[rows.slots[drafted]] -= 1 + flight.num_drafts - kept_R[drafted]", "pass"),
    Mutant("no room for drafts", SCHEDULER, "end = int(self._planned[request.slot]) + 1 + num_drafts", "end = int(self._planned[request.slot]) + 1"),
    Mutant("drafts overdraw the token budget", SCHEDULER, "num_drafts = min(self.num_drafts, self.step_tokens // len(rows.requests) - 1)", "num_drafts = self.num_drafts"),
    Mutant("stop inside accepted drafts ignored", SCHEDULER, "                here = np.delete(here, ended)\n", "                pass\n"),
    Mutant("the limit is noticed one token late", SCHEDULER, "elif len(request.tokens) >= request.limit:", "elif len(request.tokens) > request.limit:"),
    Mutant("slot leaked on preemption", SCHEDULER, "        self._free_slots.append(request.slot)\n", "        pass\n"),
    Mutant("restarts from the prompt only", SCHEDULER, "tokens=request.tokens.tobytes()", "tokens=request.spec.prompt"),
    Mutant("changed rows are called the same", SCHEDULER, "        same = decodes is self._last_decodes\n", "        same = len(decodes.requests) == len(self._last_decodes.requests)\n"),
    Mutant("a preempted request keeps its row", SCHEDULER, "[r for r in rows.requests if r.slot >= 0 and r.id not in stalled]", "[r for r in rows.requests if r.id not in stalled]"),
    Mutant("a stalled request keeps its row", SCHEDULER, "[r for r in rows.requests if r.slot >= 0 and r.id not in stalled]", "[r for r in rows.requests if r.slot >= 0]"),
    Mutant("grants written at the wrong index", SCHEDULER, "at = int(self._room[request.slot]) // self.memory.page_tokens", "at = int(self._planned[request.slot]) // self.memory.page_tokens"),
    Mutant("tokens in flight forgotten on preemption", SCHEDULER, "victim.num_in_flight = int(self._planned[victim.slot]) + 1 - len(victim.tokens)", "victim.num_in_flight = 0"),
    Mutant("a preempted request leaves its newest tokens behind", SCHEDULER, "        self._tails.flush(victim)\n", ""),
    Mutant("a slot's next request inherits a tail", TAILS, "        self._counts_N[request.slot] = 0\n", ""),
    Mutant("only a request's last stop id ends it", TAILS, "stops[:STOPS]", "stops[-1:]"),
    Mutant("of many stop ids some are never looked for", TAILS, "due if len(request.stop_ids) <= STOPS else 1", "due"),
    Mutant("decodes and chunks overdraw the budget", POLICY, "min(share, step_tokens - num_decoded)", "min(share, step_tokens)"),
    Mutant("decode rows ignore their own budget", SCHEDULER, "        plan.budget = prompt_budget(self.step_tokens, self.mixed_step_tokens, num_decoded)\n", "        plan.budget -= num_decoded\n"),
    Mutant("prompts starve beside many decode rows", POLICY, "-(-mixed_step_tokens // 4)", "0"),
    Mutant("drafts are not counted", SCHEDULER, "num_decoded = len(rows.requests) * (1 + num_drafts)", "num_decoded = len(rows.requests)"),
    Mutant("steps without decode rows have the smaller budget", SCHEDULER, "plan = Plan(self.step_tokens)", "plan = Plan(self.mixed_step_tokens)"),
    Mutant("the longest context is understated", SCHEDULER, "self._longest = max(self._longest, int(ends.max()))", "self._longest = max(self._longest, int(ends.min()))"),
    Mutant("first tokens are matched to the wrong requests", SCHEDULER, "rows = rows_of(decodes.requests + firsts)", "rows = rows_of(firsts + decodes.requests)"),
    Mutant("counts left out although rows differ", SCHEDULER, "ids, counts = ids[kept_R > 0], kept_R[kept_R > 0].tobytes()", "ids = ids[kept_R > 0]"),
    Mutant("drafts of rows with a grammar", SCHEDULER, "        if rows.masked:\n", "        if False:\n"),
    Mutant("first tokens escape the grammar", SCHEDULER, "masked=rows.masked", "masked=decodes.masked"),
    Mutant("masks are for other rows", "nanovllm/sched/rows.py", "[i for i, r in enumerate(requests) if r.spec.grammar]", "[i for i, r in enumerate(requests[::-1]) if r.spec.grammar]"),
    Mutant("masks made before the last tokens are known", "nanovllm/engine/loop.py", "                self._complete(0)  # a mask", "                # a mask"),
    Mutant("the masker never hears of tokens", "nanovllm/engine/loop.py", "        self.masker.advance(output)\n", ""),
    Mutant("waiting never ages", POLICY, "(priority * ageing_steps + step, arrival)", "(priority, arrival)"),
    Mutant("priority ignored", POLICY, "(priority * ageing_steps + step, arrival)", "(step, arrival)"),
    Mutant("device: recurrent state not rolled back", PAPER, "slot.length, slot.state, slot.last = length, state, tokens[-1]", "slot.length, slot.last = length, tokens[-1]"),
    Mutant("device: results in reverse order", PAPER, "np.array(sampled[::-1], np.int32)", "np.array(sampled, np.int32)"),
]  # fmt: skip
