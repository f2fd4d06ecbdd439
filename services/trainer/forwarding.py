"""Forward and backward of the open step, while its groups still come.

A micro-batch is forwarded as soon as the samples at hand fill it well; what is left is planned when
the step has all its groups. Gradients are sums that are divided at the end, so when a sample was
forwarded, and beside which, changes nothing but the time.

waits_for: the torch thread. unblocked_by: itself.
"""

import time

from services.trainer.intake import AdmittedGroup
from services.trainer.learner import Learner
from services.trainer.measure import StepTimes
from services.trainer.planner import Plan, merge
from services.trainer.ready import READY_FILL
from services.trainer.step import StepResult
from services.trainer.torch_thread import TorchThread
from services.trainer.types import Row, TrainSample


class Forwarding:
    """The samples of one step on their way through the model.

    Example: rows of 100 tokens on one rank. Groups of 60, 35 and 40 tokens come one by one: 60 are
    kept, 95 fill a row, which is forwarded while the third group is still generated; its 40 are
    forwarded by `rest()`.
    """

    def __init__(
        self, learner: Learner, torch: TorchThread, times: StepTimes, *, skips_zero_signal: bool
    ) -> None:
        self._learner, self._torch, self._times = learner, torch, times
        self._skips = skips_zero_signal
        self.samples: list[TrainSample] = []
        """Of the groups so far, in the order in which these came; without those that are skipped
        for want of signal."""
        self._group_ids: list[str] = []
        """Of each sample."""
        self._plans: list[Plan] = []
        """Of all samples that are not pending."""
        self._pending: list[int] = []
        """Samples that are in no plan yet."""
        self._fill = 0.0
        """Micro-batches that the pending samples fill, at most."""
        self._looked = True
        """Whether nothing has come since the pending samples were last found too few."""
        self._busy_s = 0.0

    def add(self, group: AdmittedGroup) -> None:
        """A group has its seat."""
        if self._skips and group.zero_signal:
            return
        first = len(self.samples)
        self.samples.extend(group.samples)
        self._group_ids.extend([group.group_id] * len(group.samples))
        self._pending.extend(range(first, len(self.samples)))
        self._fill += self._learner.fill_at_most(group.samples)
        self._looked = False

    async def forward_ready(self) -> bool:
        """Forward the micro-batches that are well filled; False when none is."""
        # To ask the torch thread for each group of many small ones would cost more than it finds.
        if self._looked or self._fill < READY_FILL:
            return False
        begin_s = time.monotonic()
        samples = [self.samples[index] for index in self._pending]
        plan, kept = await self._torch(self._learner.plan_ready, samples)
        self._looked = True
        self._busy_s += time.monotonic() - begin_s
        pending, self._pending = self._pending, [self._pending[index] for index in kept]
        of_group: dict[str, list[TrainSample]] = {}
        for index in self._pending:
            of_group.setdefault(self._group_ids[index], []).append(self.samples[index])
        self._fill = sum(map(self._learner.fill_at_most, of_group.values()))
        await self._forward(plan.renumbered(pending))
        return bool(plan.microbatches)

    async def forward_rest(self) -> Plan:
        """Forward all that is left: no other group will come. What became of all samples of the
        step, as one plan."""
        begin_s = time.monotonic()
        samples = [self.samples[index] for index in self._pending]
        plan = await self._torch(self._learner.plan, samples)
        self._busy_s += time.monotonic() - begin_s
        pending, self._pending = self._pending, []
        await self._forward(plan.renumbered(pending))
        begin_s = time.monotonic()
        if len(self._plans) > 1:
            plan = await self._torch(merge, self.samples, self._plans)
        self._busy_s += time.monotonic() - begin_s
        return plan

    async def _forward(self, plan: Plan) -> None:
        self._plans.append(plan)
        begin_s = time.monotonic()
        for microbatch in plan.microbatches:
            rows = [Row([self.samples[i] for i in row.samples], row.echo) for row in microbatch]
            await self._torch(self._learner.accumulate, rows)
        self._busy_s += time.monotonic() - begin_s

    async def finish(self) -> StepResult:
        """The optimizer's part of the step; its times are complete then."""
        begin_s = time.monotonic()
        result = await self._torch(self._learner.finish)
        self._busy_s += time.monotonic() - begin_s
        times = self._times
        times.fwd_s, times.fwd_bwd_s = result.fwd_s, result.fwd_bwd_s
        times.optimizer_s = result.optimizer_s
        # Planning, packing, and the way to the torch thread and back.
        times.data_s += self._busy_s - result.fwd_bwd_s - result.optimizer_s
        return result

    @property
    def unused(self) -> set[str]:
        """Groups of which no sample was trained, all of them being beyond the budgets."""
        rows = [row for plan in self._plans for row in plan.rows]
        used = {self._group_ids[index] for row in rows for index in row.samples}
        return set(self._group_ids) - used
