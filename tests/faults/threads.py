"""One model asked from eight threads at once: what each gets is what it would have got alone, bit for bit."""

import random
import threading
from pathlib import Path

import torch

from tests.faults.models import make_models
from tests.faults.part import Outcome, Part

THREADS, PREDICTIONS = 8, 100


class Threads(Part):
    """Predictions, with and without gradients, of every kind of model."""

    name = "threads"
    bar = f"{THREADS} x {PREDICTIONS} concurrent predictions: all equal to the serial ones"
    n = 20
    sample = 5

    def prepare(self) -> None:
        self.models = make_models()

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        opened = self.models[number % len(self.models)]
        gradients = number // len(self.models) % 2 == 1
        batches = [opened.draw(rng.choice((1, 4, 16)), i) for i in range(PREDICTIONS)]
        ready, beginning, wrong = threading.Barrier(THREADS), threading.Lock(), []

        def ask(i: int) -> torch.Tensor:
            with torch.set_grad_enabled(gradients):
                return opened.ask(batches[i]).detach()

        serial = [ask(i) for i in range(PREDICTIONS)]

        def work(thread: int) -> None:
            order = list(range(PREDICTIONS))
            random.Random(thread).shuffle(order)
            with beginning:  # torch's pool of a forked process is made anew by the first threads, which must not race
                torch.get_num_threads()
            ready.wait()
            for i in order:
                try:
                    if not torch.equal(ask(i), serial[i]):
                        wrong.append(f"another prediction of batch {i}")
                except Exception as error:
                    wrong.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        words = f"{opened.name}, {'with' if gradients else 'without'} gradients"
        if wrong:
            return Outcome("not as alone", False, f"{words}: {len(wrong)} wrong, such as {wrong[0]}")
        return Outcome("as alone", True, words)
