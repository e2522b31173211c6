"""vLLM's schedulers with an admission policy in front: `--scheduler-cls vlmopt.serving.scheduler.policy_scheduler`.

Before each step the mixin shows the policy the block pool, what runs and what waits, sets aside those of the waiting
that may not start, lets vLLM schedule the rest, and puts the others back in their order. vLLM still checks blocks,
token budget and slots itself: a policy can hold a request back, never force one in. Four methods of vLLM's scheduler
are extended (`__init__`, `schedule`, `update_from_output`, `add_request`); nothing of vLLM is copied or replaced.

vLLM 0.26 keeps blocked requests in `skipped_waiting`; 0.32 keeps those that hold blocks in `kv_holding_waiting` and the
others in `waiting`: `_queues` and `_holds_blocks` look before they touch.

The policy is switched in a running engine by a message that travels as a request (`control_params`, `switch`): the one
way into a scheduler that is the same in process, in another process, and behind the HTTP server. `collective_rpc`
reaches vLLM's workers, its utility calls fixed methods of the engine core; neither reaches a scheduler's own method.
With data parallelism every engine has its own scheduler and needs its own message.
"""

import json
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.version import __version__

from vlmopt.errors import VlmoptError
from vlmopt.serving.admission import PLAIN, Counts, Knowledge, Said, Settings, check_version
from vlmopt.serving.channel import Sender, address_of
from vlmopt.serving.policy import ASK_EVERY, Decision, Running, State, Waiting, decide

check_version(__version__)
logger = init_logger("vllm.vlmopt")

WINDOW = 512  # of a longer queue the policy sees the first, by arrival: a step's cost stays bounded
MESSAGE = "vlmopt_admission"
NOBODY = Decision((), {}, {})
_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class AdmissionMixin:
    """Admission by `vlmopt.serving.policy` over a vLLM scheduler class.

    `settings`, `counts` and `knowledge` may be read between steps; `set_policy` switches where the object is at hand.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        values = additional.get("vlmopt", {}) if isinstance(additional, dict) else {}
        self._said: dict[str, Said] = {}
        self._started: dict[str, tuple[Request, float]] = {}
        self._messages: dict[str, str] = {}
        self._farewells: list[tuple[int, EngineCoreOutput]] = []
        self._held_by: tuple[list[str], list[str]] | None = None  # who waited and ran when nobody might start
        self._held_for = 0  # steps since
        self._sender = Sender(address_of(self.vllm_config.instance_id)) if self.log_stats else None
        self._use(Settings.make(values))

    def set_policy(self, **values: Any) -> None:
        """Change settings between two steps; counts and what was learned start anew.

        Raises:
            VlmoptError: an unknown name or a bad value; nothing is changed.
        """
        self._use(Settings.make(values, self.settings))

    def add_request(self, request: Request) -> None:
        """As vLLM's; also reads what the request says of itself."""
        extra = request.sampling_params.extra_args if request.sampling_params else None
        if extra and MESSAGE in extra:
            self._messages[request.request_id] = extra[MESSAGE]
        said = Said.read(extra)
        self._said[request.request_id] = said
        self.counts.faults += said.faults
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: vLLM's own `schedule` over the requests that the policy lets start."""
        now = time.time()
        self._answer_messages()
        aside = self._set_aside(now)
        before = list(self.running)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._put_back(aside)
        self._count(before, now)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, with the last word to requests that were refused or were messages."""
        outputs = super().update_from_output(*args, **kwargs)
        self._learn(time.time())
        self._tell()
        for client, farewell in self._farewells:
            if client not in outputs:
                outputs[client] = EngineCoreOutputs()
            outputs[client].outputs.append(farewell)
        self._farewells.clear()
        return outputs

    def _use(self, settings: Settings) -> None:
        if settings.policy != PLAIN and self.scheduler_config.policy != "fcfs":
            raise VlmoptError(
                f"the policy {settings.policy!r} orders the queue itself; start vLLM with --scheduling-policy fcfs, or "
                f"choose the policy {PLAIN!r}."
            )
        self.settings = settings
        self._held_by = None
        self.counts = Counts()
        self.counted_since = time.time()
        self.knowledge = Knowledge(settings)

    def _queues(self) -> list[Any]:
        named = (getattr(self, name, None) for name in ("skipped_waiting", "waiting"))
        return [queue for queue in named if queue]

    def _state(self, candidates: list[Request], now: float) -> State:
        # Where layers come in several groups, each group takes blocks of the one pool for the same tokens.
        managers = self.kv_cache_manager.coordinator.single_type_managers
        share = max(1, sum(self.block_size // manager.block_size for manager in managers))
        pool = self.kv_cache_manager.block_pool
        held = [r for queue in (*self._queues(), getattr(self, "kv_holding_waiting", ())) for r in queue]
        return State(
            now=now,
            block_size=self.block_size,
            free_blocks=pool.get_num_free_blocks() // share,
            total_blocks=(pool.num_gpu_blocks - 1) // share,  # one block of the pool is vLLM's placeholder
            max_running=getattr(self, "max_num_active_reqs", self.max_num_running_reqs),
            running=tuple(map(self._running, [*self.running, *filter(_holds_blocks, held)])),
            waiting=tuple(self._waiting(request) for request in candidates),
        )

    def _facts(self, request: Request) -> tuple[dict[str, Any], int]:
        """The fields that running and waiting requests share, and the tokens that the request can reach."""
        said = self._said.get(request.request_id, Said())
        prompt = request.num_prompt_tokens
        output = request.num_output_tokens + request.num_output_placeholders
        slo = said.slo or self.settings.slo
        most = min(prompt + (said.max_tokens or request.max_tokens), self.max_model_len)
        ahead = self.num_spec_tokens + self.num_lookahead_tokens  # held beyond the last token, 0 without speculation
        fields = {
            "id": request.request_id,
            "prompt": prompt,
            "output": output,
            "expected": self.knowledge.expected(said.kind, prompt, output, most) + ahead,
            "arrival": request.arrival_time,
            "deadline": request.arrival_time + slo if slo else None,
        }
        return fields, most + ahead

    def _running(self, request: Request) -> Running:
        return Running(computed=request.num_computed_tokens, **self._facts(request)[0])

    def _waiting(self, request: Request) -> Waiting:
        fields, most = self._facts(request)
        service = self.knowledge.service(fields["expected"] - fields["prompt"] - fields["output"])
        return Waiting(service=service, most=most, **fields)

    def _set_aside(self, now: float) -> list[tuple[Any, list[Request], set[str]]]:
        """Leave only the admitted in the queues, in the policy's order: (queue, all it held, ids left in it)."""
        if self.settings.policy == PLAIN:
            return []
        candidates = [r for queue in self._queues() for r in queue if not _holds_blocks(r)]
        if not candidates:
            return []
        decision = self._decide(candidates, now)
        place = {name: index for index, name in enumerate(decision.start)}
        aside = []
        for queue in self._queues():
            requests = list(queue)
            admitted = sorted((r for r in requests if r.request_id in place), key=lambda r: place[r.request_id])
            left = [*filter(_holds_blocks, requests), *admitted]
            queue.remove_requests(requests)
            _append(queue, left)
            aside.append((queue, requests, {request.request_id for request in left}))
        return aside

    def _decide(self, candidates: list[Request], now: float) -> Decision:
        """The policy's; while nobody comes or goes, one that let nobody start holds for some steps."""
        present = [r.request_id for r in candidates], [r.request_id for r in self.running]
        if present == self._held_by and self._held_for < ASK_EVERY - 1:
            self._held_for += 1
            return NOBODY
        candidates.sort(key=lambda request: request.arrival_time)
        decision = decide(self.settings.policy, self._state(candidates[:WINDOW], now), self.settings.options)
        self.counts.decisions += 1
        self.counts.held.update(decision.held.values())
        self._refuse(decision)
        self._held_by, self._held_for = (None if decision.start or decision.refuse else present), 0
        return decision

    def _put_back(self, aside: list[tuple[Any, list[Request], set[str]]]) -> None:
        """The queues as they were, less what left them, with what this step preempted in front."""
        for queue, requests, left in aside:
            now_in = list(queue)
            ids, known = ({request.request_id for request in group} for group in (now_in, requests))
            stay = [r for r in requests if r.request_id in ids or r.request_id not in left]
            queue.remove_requests(now_in)
            _append(queue, [*(r for r in now_in if r.request_id not in known), *stay])

    def _refuse(self, decision: Decision) -> None:
        for name, reason in decision.refuse.items():
            self.counts.refused[reason] += 1
            logger.warning("request %s refused: %s", name, reason)
            self._end(name, RequestStatus.FINISHED_ABORTED, reason)

    def _answer_messages(self) -> None:
        for name, message in self._messages.items():
            if name not in self.requests:
                continue  # its client left
            if not self.settings.control:
                reply = {"error": "this engine takes no messages; start it with the admission setting 'control': true."}
            else:
                reply = {"counts": self.counts.as_dict(), "settings": self.settings.as_dict()}
                try:
                    self._obey(message)
                except VlmoptError as error:
                    reply = {"error": str(error)}
            self._end(name, RequestStatus.FINISHED_STOPPED, json.dumps(reply))
        self._messages.clear()

    def _obey(self, message: Any) -> None:
        try:
            values = json.loads(message)
        except (ValueError, TypeError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise VlmoptError(f"a message to the scheduler is a JSON object of settings, not {str(message)[:100]!r}.")
        if "control" in values:
            raise VlmoptError("'control' is set where the engine is started.")
        if values:
            self.set_policy(**values)

    def _end(self, name: str, status: RequestStatus, last_word: str) -> None:
        """End a request that has not started; its client reads `last_word` as the stop reason."""
        for request in self.finish_requests(name, status) or ():
            farewell = EngineCoreOutput(
                request_id=name,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=last_word,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._farewells.append((request.client_index, farewell))
        self._said.pop(name, None)

    def _learn(self, now: float) -> None:
        """Take note of what has ended."""
        for name, (request, started) in list(self._started.items()):
            if not request.is_finished():
                continue
            del self._started[name]
            if request.status in _BY_ITSELF:
                self.counts.finished += 1
                self.knowledge.finished(self._said.pop(name, Said()).kind, request.num_output_tokens, now - started)
        if len(self._said) > 2 * len(self.requests) + WINDOW:  # those aborted before they started
            self._said = {name: said for name, said in self._said.items() if name in self.requests}

    def _tell(self) -> None:
        """Send the counts to the front end, for its log and Prometheus."""
        if self._sender:
            message = {"policy": self.settings.policy, "since": self.counted_since, "counts": self.counts.as_dict()}
            self._sender.send(self.vllm_config.parallel_config.data_parallel_index, message)

    def _count(self, before: list[Request], now: float) -> None:
        self.counts.steps += 1
        self.counts.preempted += sum(request.status == RequestStatus.PREEMPTED for request in before)
        ran = {request.request_id for request in before}
        for request in self.running:
            if request.request_id in ran:
                continue
            if request.request_id in self._started:
                self.counts.resumed += 1
            else:
                self.counts.started += 1
                self._started[request.request_id] = (request, now)


class PolicyScheduler(AdmissionMixin, Scheduler):
    """vLLM's synchronous scheduler with an admission policy."""


class PolicyAsyncScheduler(AdmissionMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler, its default on a GPU, with an admission policy."""


def policy_scheduler(*args: Any, vllm_config: VllmConfig, **kwargs: Any) -> AdmissionMixin:
    """The one of the two that vLLM would have taken itself: not every way of speculation can be scheduled ahead."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (PolicyAsyncScheduler if asynchronous else PolicyScheduler)(*args, vllm_config=vllm_config, **kwargs)


def control_params(**settings: Any) -> SamplingParams:
    """Sampling parameters of a request that is a message: it changes `settings` (none: it only asks) and runs nothing.

    Its stop reason is JSON: `counts` and `settings` up to now, or `error`. With a change, counts and what was learned
    start anew. Over HTTP ask without streaming: a stream of no tokens ends without a word.
    """
    return SamplingParams(max_tokens=1, detokenize=False, extra_args={MESSAGE: json.dumps(settings)})


def switch(llm: Any, **settings: Any) -> dict[str, Any]:
    """Send a message to a `vllm.LLM` and return the counts and settings that held until now.

    Raises:
        VlmoptError: the engine was started without `control`, or a setting is bad; nothing is changed.
    """
    return reply_of(llm.generate([{"prompt_token_ids": [0]}], control_params(**settings), use_tqdm=False)[0])


def reply_of(output: RequestOutput) -> dict[str, Any]:
    """What the scheduler answered to a message: the counts and settings that held until then.

    Raises:
        VlmoptError: the engine was started without `control`, or a setting is bad; nothing is changed.
    """
    reply = json.loads(output.outputs[0].stop_reason)
    if "error" in reply:
        raise VlmoptError(reply["error"])
    return reply


def _holds_blocks(request: Request) -> bool:
    return request.num_computed_tokens > 0 or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def _append(queue: Any, requests: list[Request]) -> None:
    for request in requests:
        queue.add_request(request)
