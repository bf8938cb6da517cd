"""The server's program: Algorithm 2 of the paper.

The server holds the layers after the cut, one replica for each device, and serves micro-batches first come first
served. It aggregates the complete models at the end of each round and sends every device its part of the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pipar.errors import PiparError, ProtocolError, TryAgainError
from pipar.events import BudgetSpent, DevicesEvaluated, EndedByCallback, RoundOver
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.server.device_evaluation import DeviceEvaluation
from pipar.server.epoch_results import RoundSummary
from pipar.server.interfaces import Enrolment, Learner, ServerLanes, Services, SessionSettings, Training
from pipar.server.lost_devices import LostDeviceWatch
from pipar.server.membership import Membership
from pipar.server.message_limits import MessageLimits
from pipar.server.model_exchange import ModelExchange
from pipar.server.participants import Participants
from pipar.server.plan_updates import PlanUpdates
from pipar.server.progress import ProgressReporter
from pipar.server.replicas import Replicas, SharedReplica
from pipar.server.rounds import Round, Rounds, run_to_end
from pipar.server.serving import Serving
from pipar.server.session import Session
from pipar.server.validation import Validation
from pipar.transport.interface import Transport


class Server:
    """The server, from the first device's hello to 'stop training'."""

    def __init__(
        self,
        training: Training,
        learner: Learner,
        enrolment: Enrolment,
        lanes: ServerLanes,
        services: Services,
        sessions: SessionSettings,
    ) -> None:
        self.done = 0  # the last round that is complete
        self._last_round_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._training = training
        self._draws = training.draw.is_partial
        self._lanes = lanes
        self._results, self._accountant = services.results, services.accountant
        self._checkpointer, self._observe = services.checkpointer, services.observe
        pool, method = lanes.pool, training.method
        self._membership = membership = Membership(
            enrolment, sessions, services.results, services.accountant, services.observe
        )
        membership.draws = self._draws
        self._plans = plans = PlanUpdates(
            learner,
            pool,
            membership,
            MessageLimits(learner, sessions.network, sessions.targets),
            services,
            draws=training.draw.is_partial,
        )
        self._participants = Participants(training, learner, enrolment, membership, plans, pool, services.observe)
        self._validation = Validation(learner, training.validation, lanes.background, services)
        self._evaluation = DeviceEvaluation(learner, lanes.evaluation or pool, plans, training)
        self._exchange = ModelExchange(learner, pool, plans, self._validation)
        self._replicas = SharedReplica(learner, pool, method) if method.shares_server_model else Replicas(learner, pool)
        self._progress = progress = ProgressReporter(membership, lanes.recorder, services.observe)
        serving = Serving(
            membership, self._replicas, plans, self._exchange, progress, services.observe, at_once=training.at_once
        )
        self._rounds = Rounds(training, membership, self._replicas, serving, self._exchange, services.observe)

    # --- Algorithm 2

    async def train(self, done: int = 0) -> None:
        """Train all epochs after the first `done`, or until the validation loss has not improved for `patience`."""
        self.done = done
        if self._membership.timeouts.watches_silence:
            self._watching = asyncio.create_task(LostDeviceWatch(self._membership).watch())
        try:
            await self._participants.begin(done)  # line 1: split points P^k, of which the replicas are built
            await self._train_rounds(done)
        except PiparError as error:
            self._membership.refuse_all(error)
            raise
        finally:
            self._plans.close()

    async def _train_rounds(self, done: int) -> None:
        epoch = done
        while epoch < self._training.epochs and not await self._is_over(epoch):  # line 2
            wanted = self._rounds.take_wanted()
            group = await self._gather(epoch, wanted)
            if await self._is_budget_spent(group, epoch):
                break
            began_at = asyncio.get_running_loop().time()
            group = await self._draw(epoch, wanted) if self._draws else [one for one in group if not one.is_over]
            if group and await self._train_round(epoch + 1, group, began_at if self._draws else None):
                epoch += 1  # otherwise all devices were lost, and the same round starts over
                await self._evaluation.finish()
        if self._draws and epoch:
            await self._evaluate_everywhere(epoch)
        if self._checkpointer is not None:
            # Before the devices leave: if it were lost, none would be there to train the last rounds again.
            await self._checkpointer.save_end(epoch)
        self._membership.stop(epoch)
        await self._results.deliver(epoch, self._membership.sessions.keys())

    async def _train_round(self, epoch: int, group: Sequence[Session], began_at: float | None) -> bool:
        """Train one epoch; return whether there is a new global model."""
        this = await self._rounds.serve(epoch, group, began_at)  # lines 3 to 19
        # The new model, its log and its checkpoint belong together.
        return await run_to_end(self._finish_round(this))

    async def _finish_round(self, this: Round) -> bool:
        await self._rounds.aggregate(this)  # line 20
        if not this.contributions:
            await self._rounds.discard(this)
            return False
        self._participants.release_absent()
        if this.epoch < self._training.epochs:
            await self._plans.adopt(this.epoch)
        present = await self._send_models(this)  # lines 21 to 23
        seconds = this.seconds
        on_devices = await self._evaluation.start(this.epoch, self._evaluating(this, present), seconds)
        self._record(this, self._request_traces(this, present), seconds)
        self._validation.start(this.epoch, on_devices)  # during the next round, at the lowest priority
        self._results.check()
        if self._checkpointer is not None:
            await self._checkpointer.save_if_due(this.epoch, last=False)
        return True

    async def _gather(self, done: int, wanted: int) -> list[Session]:
        """Return the devices of the next round when there are enough; those that train first have the latest model.

        If devices are drawn, these are all that can be, and get the model when they are.
        """
        await self._participants.gather(done, wanted)
        # A device that joins while these models are packed waits for the next round.
        if not self._draws:
            await self._send_latest(self._membership.welcomed(), done)
        return self._membership.welcomed()

    async def _draw(self, done: int, wanted: int) -> list[Session]:
        """Return the devices that are drawn for the next round; those that train first have the latest model."""
        drawn = await self._participants.draw(done, wanted)
        self._progress.devices = len(drawn)
        await self._send_latest(drawn, done)
        return [session for session in drawn if not session.is_over]

    async def _send_latest(self, group: Sequence[Session], done: int) -> None:
        await self._exchange.distribute([one for one in self._first_of(group) if one.has_model_of != done], done)

    def _first_of(self, group: Sequence[Session]) -> Sequence[Session]:
        """Return the devices that begin a round: all of them, in split learning the first one."""
        return group[:1] if self._training.method.one_device_at_a_time else group

    async def _send_models(self, this: Round) -> list[Session]:
        """Send the devices their parts of the new model; return those that are here."""
        present = self._membership.welcomed()
        if not self._draws:  # otherwise it is not known yet which devices need it
            await self._exchange.distribute(self._first_of(present), this.epoch)
        return present

    def _evaluating(self, this: Round, present: Sequence[Session]) -> list[Session]:
        """Return the devices that evaluate the new model: all that are here; if they are drawn, those of the round."""
        return [session for session in present if not self._draws or session.device in this.samples]

    async def _evaluate_everywhere(self, epoch: int) -> None:
        """Let also the devices that were not drawn for the last round evaluate the last model."""
        scores = await self._evaluation.start(epoch, self._membership.welcomed(), self._last_round_s)
        if scores is not None:
            self._observe(DevicesEvaluated(epoch, (await scores).to_dict()))

    def _request_traces(self, this: Round, present: Sequence[Session]) -> list[Session]:
        """Return the devices of the round, whose traces will follow."""
        reporting = [session for session in present if session.device in this.samples and not session.is_over]
        for session in reporting:
            session.request_trace(this.epoch)  # it travels while the first batch of the next epoch is computed
        return reporting

    def _record(self, this: Round, reporting: Sequence[Session], seconds: float) -> None:
        counted, epsilon = this.samples, self._accountant.largest_epsilon()
        self._results.add_round(
            this.epoch,
            RoundSummary(counted, this.train_loss, seconds, this.errors, epsilon, this.passes, is_drawn=self._draws),
            reporting=[session.device for session in reporting],
        )
        self.done = this.epoch
        self._last_round_s = seconds
        self._membership.timeouts.round_is_over(seconds)
        partly = self._replicas.partly_trained(counted)
        self._observe(RoundOver(this.epoch, counted, partly, self._accountant.epsilons()))

    async def _is_over(self, epoch: int) -> bool:
        """Return whether an epoch was the last: the caller has ended the training, or it has converged."""
        if self._training.should_stop():
            self._observe(EndedByCallback(epoch))
            return True
        return await self._has_converged(epoch)

    async def _has_converged(self, epoch: int) -> bool:
        """Decide by the validation losses up to the previous epoch: this epoch's is computed during the next."""
        if self._training.patience is None:
            return False
        return await self._results.stale_epochs(max(0, epoch - 1)) >= self._training.patience

    async def _is_budget_spent(self, group: Sequence[Session], done: int) -> bool:
        """Dismiss devices whose privacy budget the next round would exceed; return whether too few are left for it.

        Then an event says so. A device's own count costs only itself: as long as others can train, they do.
        """
        over = self._accountant.would_exceed(session.device for session in group)
        if over is None:
            return False
        if self._has_enough_budget():
            for name in self._accountant.spent(session.device for session in group):
                if (session := self._membership.sessions.get(name)) is not None:
                    await self._membership.dismiss(session, self._accountant.no_budget_left(name))
            return False
        noise = self._accountant.noise
        assert noise is not None
        assert noise.target_epsilon is not None
        self._observe(BudgetSpent(done, *over, noise.target_epsilon))
        return True

    def _has_enough_budget(self) -> bool:
        """Return whether a device that is here has a release left, and, in a closed fleet, enough for a round have.

        Only devices that are here count: one that has left may never return, and the others would wait for ever.
        """
        here = {session.device for session in self._membership.present()}
        if len(self._accountant.spent(here)) == len(here):
            return False
        fleet = self._training.plans.keys()  # known before any device joined, if no other may join
        left = len(fleet) - len(self._accountant.spent(fleet))
        return not fleet or left >= self._training.min_devices

    # --- around the training

    async def admit(self, transport: Transport, peer: str | None = None) -> None:
        """Let a device join or resume, one call for each connection; `peer` is the name in its credential."""
        await self._membership.admit(transport, peer)

    def report_refused(self, origin: str, reason: str, device: str = "") -> None:
        """Report a connection that never reached `admit`, by the device of its credential or where it came from."""
        self._membership.report_refused(origin, reason, device)

    def revoke(self, device: str) -> None:
        """End the session of a device whose credential was revoked, at once: it may not resume."""
        self._membership.revoke(device)

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions of all devices that are connected, or may resume."""
        return self._membership.present()

    def plan_of(self, device: str) -> Plan:
        """Return the current plan of a device."""
        return self._plans.orders(device).plan

    def fleet(self) -> Fleet | None:
        """Return the fleet as the training has shown it; None where nothing is predicted."""
        return self._results.fleet()

    async def dismiss_unless(self, check: Callable[[str], None]) -> None:
        """Dismiss the devices for whose name the check raises ProtocolError; those that may try again stay."""
        for session in self._membership.present():
            try:
                check(session.device)
            except TryAgainError:
                continue
            except ProtocolError as error:
                await self._membership.dismiss(session, error)

    async def wait_until_left(self) -> None:
        """Return when every device has left, after 'stop training'."""
        await self._membership.wait_until_left()

    async def suspend(self, reason: str) -> None:
        """Tell all devices why the training stops for now, and to retry later; then save its current state."""
        await self._membership.suspend(reason)
        # In the middle of a round the replicas have moved on, and with them the optimisers or the shared model.
        can_save = not self._plans.keep_state and not self._training.method.shares_server_model
        if self._checkpointer is not None and can_save:
            await self._checkpointer.save_if_due(self.done, last=True)

    def close(self) -> None:
        """End all sessions and lanes; no running work changes the model afterwards."""
        if self._watching is not None:
            self._watching.cancel()
        self._membership.close()
        self._lanes.pool.close()
        self._lanes.background.close()
        if self._lanes.evaluation is not None:
            self._lanes.evaluation.close()
