"""Choose which waiting prompts are prefilled together."""

import collections
from collections.abc import Iterator

from mugrpo_jax.sampling.requests import Request
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


class PromptQueue:
    """A queue of requests for each prompt bucket. The bucket with the oldest request is prefilled next.

    Requests are read from their iterator only when they are needed. Which prompts are prefilled together
    depends on the order of the requests, and not on the time at which they arrive.
    """

    def __init__(self, requests: Iterator[Request], plan: SamplerPlan) -> None:
        self.plan = plan
        self.buckets: dict[int, collections.deque[tuple[int, Request]]] = {}
        self.count = 0
        self._requests = enumerate(request for request in requests if len(request.seeds))

    def __bool__(self) -> bool:
        return self.count > 0 or self._read()

    def take(self) -> tuple[int, list[Request]]:
        """Remove the requests to prefill next; return their bucket and the requests."""
        bucket, queue = min(self.buckets.items(), key=lambda item: item[1][0][0])
        rows = self.plan.prefill_rows(bucket)
        while len(queue) < rows and self.count < self.plan.slots and self._read():
            pass
        requests = [queue.popleft()[1] for _ in range(min(len(queue), rows))]
        self.count -= len(requests)
        if not queue:
            del self.buckets[bucket]
        return bucket, requests

    def _read(self) -> bool:
        """Read one more request and add it to its bucket; return False if there are no more requests."""
        for place, request in self._requests:
            bucket = next(size for size in self.plan.prompt_buckets if size >= len(request.prompt))
            self.buckets.setdefault(bucket, collections.deque()).append((place, request))
            self.count += 1
            return True
        return False
