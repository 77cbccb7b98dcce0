"""Plays a case on a virtual clock: stages compute, messages travel, steps commit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from edgetrain.errors import PlanError
from edgetrain.planner.course import Course
from edgetrain.planner.event_clock import EventClock
from edgetrain.planner.timeline_case import Case
from edgetrain.planner.timeline_links import Link, Links
from edgetrain.planner.timeline_nodes import COORDINATOR, START, Hop, Node, Record
from edgetrain.planner.timeline_post import Mail, Message, Post
from edgetrain.planner.timeline_work import LABELS, Sent, Work, works
from edgetrain.schedules.actions import Action, Op
from edgetrain.schedules.table import SCHEDULES

_LEAVE: Final = "leave to begin"


@dataclass(slots=True)
class _Processor:
    """One device's; it runs one computation at a time, first come first served."""

    course: Course
    busy: bool = False
    queue: deque[tuple[_Stage, float, int]] = field(default_factory=deque)
    last_node: int = START


@dataclass(slots=True)
class _Stage:
    number: int
    device: int
    processor: _Processor
    works: tuple[Work, ...]
    keeps_stash: bool
    step: int = 0
    next: int = 0
    mail: dict[Mail, tuple[int, float]] = field(default_factory=dict)
    queued: bool = False
    stash: int = 0
    stash_peak: int = 0
    waiting_bytes: float = 0.0
    waiting_peak_bytes: float = 0.0
    compute_s: float = 0.0

    def needs(self) -> list[Mail]:
        """What its next computation waits for."""
        work = self.works[self.next]
        m = work.action.microbatch
        mail = [Mail(kind, self.step, m) for kind in work.needs]
        return mail if self.next else [Mail(_LEAVE, self.step), *mail]


class Played(NamedTuple):
    """What happened.

    Attributes:
        ends: of each step: when the last stage was done, and that node's number.
        stash_peak: the most microbatches stashed at once, per stage.
        waiting_peak_bytes: the most that had arrived and was not yet used, per stage.
        compute_s: in all, per stage.
        record: of the steps that were kept.
        links: with the bytes that each has carried.
    """

    ends: list[tuple[float, int]]
    stash_peak: tuple[int, ...]
    waiting_peak_bytes: tuple[float, ...]
    compute_s: tuple[float, ...]
    record: Record
    links: tuple[Link, ...]


class Engine:
    """One run of a case.

    Args:
        case: what is simulated.
        steps: to play.
        kept_from: the first step whose nodes are recorded; `steps` for none.
    """

    def __init__(self, case: Case, steps: int, kept_from: int) -> None:
        self._case = case
        self._steps = steps
        self._clock = EventClock()
        self._record = Record(kept_from)
        self._post = Post(self._clock, case.network, self._record)
        self._links = Links(case)
        index = {device.name: i for i, device in enumerate(case.devices)}
        processors = [_Processor(Course(1.0, device.speeds)) for device in case.devices]
        self._stages: list[_Stage] = []
        for s, stage in enumerate(case.stages):
            mine = tuple(works(case, s))
            keeps = any(work.action.op is Op.BACKWARD for work in mine)
            device = index[stage.device]
            self._stages.append(_Stage(s, device, processors[device], mine, keeps))
        self._fed = self._committed = -1
        self._reported = [0] * steps
        self._ends = [(0.0, START)] * steps

    def run(self) -> Played:
        """Play until every stage has done every step.

        Raises:
            PlanError: a stage waits for something that never comes.
        """
        self._extend(START)
        self._clock.run()
        for stage in self._stages:
            if stage.step < self._steps:
                waits = ", ".join(mail.kind for mail in stage.needs())
                action = stage.works[stage.next].action
                raise PlanError(
                    f"the schedule stops before its end: {action} of step {stage.step}"
                    f" waits for {waits}"
                )
        return Played(
            self._ends,
            tuple(stage.stash_peak for stage in self._stages),
            tuple(stage.waiting_peak_bytes for stage in self._stages),
            tuple(stage.compute_s for stage in self._stages),
            self._record,
            self._links.all,
        )

    def _extend(self, cause: int) -> None:
        """Allow and feed more steps, a few beyond the committed one."""
        last = min(self._committed + self._case.ahead, self._steps - 1)
        while self._fed < last:
            self._fed += 1
            leave = Mail(_LEAVE, self._fed)
            for stage in self._stages:
                heard_s = self._clock.now_s + self._control_s(stage)
                self._clock.at(heard_s, partial(self._arrive, stage, leave, 0.0, cause))
            if self._case.data_on == "coordinator":
                self._feed(self._fed, cause)

    def _feed(self, step: int, cause: int) -> None:
        case = self._case
        inputs = Sent(0, Op.RECV_ACTIVATION, case.input_bytes)
        labels = Sent(len(self._stages) - 1, LABELS, case.label_bytes)
        trains = SCHEDULES[case.schedule].updates
        for m in range(case.microbatches):
            for sent in (inputs, labels) if trains else (inputs,):
                self._send(COORDINATOR, sent, (step, m), cause)

    def _control_s(self, stage: _Stage) -> float:
        """How long a command or a report takes; it is too small to hold a link."""
        case = self._case
        latency_s = case.coordinator.latency_s + case.devices[stage.device].latency_s
        return latency_s + case.network.hop_s

    def _send(
        self, source: int, sent: Sent, tick: tuple[int, int | None], cause: int
    ) -> None:
        coordinator = len(self._case.devices)
        stage = self._stages[sent.to]
        at = coordinator if source == COORDINATOR else self._stages[source].device
        step, m = tick
        mail = Mail(sent.kind, step, m)
        receive = (
            Op.RECV_COTANGENT if sent.kind == Op.RECV_COTANGENT else Op.RECV_ACTIVATION
        )
        message = Message(
            action=Action(sent.to, receive, m),
            mail=mail,
            hop=Hop(source, sent.to),
            nbytes=sent.nbytes,
            route=self._links.route(at, stage.device),
            deliver=partial(self._arrive, stage, mail, sent.nbytes),
        )
        self._post.send(message, cause)

    def _arrive(self, stage: _Stage, mail: Mail, nbytes: float, cause: int) -> None:
        stage.mail[mail] = (cause, nbytes)
        stage.waiting_bytes += nbytes
        stage.waiting_peak_bytes = max(stage.waiting_peak_bytes, stage.waiting_bytes)
        self._consider(stage, cause)
        self._dispatch(stage.processor)

    def _consider(self, stage: _Stage, cause: int) -> None:
        """Queue the stage's next computation if nothing is missing for it."""
        if stage.queued or stage.step == self._steps:
            return
        if all(mail in stage.mail for mail in stage.needs()):
            stage.queued = True
            stage.processor.queue.append((stage, self._clock.now_s, cause))

    def _dispatch(self, processor: _Processor) -> None:
        if processor.busy or not processor.queue:
            return
        stage, ready_s, cause = processor.queue.popleft()
        processor.busy = True
        now_s = self._clock.now_s
        for mail in stage.needs():
            stage.waiting_bytes -= stage.mail.pop(mail)[1]
        work = stage.works[stage.next]
        if work.action.op is Op.FORWARD and stage.keeps_stash:
            stage.stash += 1
            stage.stash_peak = max(stage.stash_peak, stage.stash)
        cause = cause if ready_s == now_s else processor.last_node
        for sent in work.sends_first:
            self._send(stage.number, sent, (stage.step, work.action.microbatch), cause)
        done_s = processor.course.end_s(now_s, work.work_s)
        stage.compute_s += done_s - now_s
        end_s = done_s + work.overhead_s
        node = Node(
            "compute", stage.number, work.action, stage.step, None, now_s, end_s, cause
        )
        processor.last_node = self._record.add(node)
        self._clock.at(end_s, partial(self._finish, stage, processor.last_node))

    def _finish(self, stage: _Stage, node: int) -> None:
        work = stage.works[stage.next]
        stage.stash -= work.action.op is Op.BACKWARD
        for sent in work.sends:
            self._send(stage.number, sent, (stage.step, work.action.microbatch), node)
        stage.queued = False
        stage.next += 1
        if stage.next == len(stage.works):
            self._finish_step(stage, node)
        self._consider(stage, node)
        stage.processor.busy = False
        self._dispatch(stage.processor)

    def _finish_step(self, stage: _Stage, node: int) -> None:
        step, now_s = stage.step, self._clock.now_s
        stage.step, stage.next = step + 1, 0
        self._ends[step] = (now_s, node)
        report = partial(self._hear, stage, step, node)
        self._clock.at(now_s + self._control_s(stage), report)

    def _hear(self, stage: _Stage, step: int, node: int) -> None:
        """Take a stage's report at the coordinator; the last one commits the step."""
        self._reported[step] += 1
        if self._reported[step] < len(self._stages):
            return
        now_s = self._clock.now_s
        action = Action(stage.number, Op.UPDATE)
        commit = Node("commit", stage.number, action, step, None, now_s, now_s, node)
        self._committed = step
        self._extend(self._record.add(commit))
