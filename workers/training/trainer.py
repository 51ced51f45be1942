"""The training loop: batches of the corpus, features of the target, one head."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.models.base import Model
from spectrue.workers.training.batches import Batch, epoch, make_batch
from spectrue.workers.training.checkpoint import load_checkpoint, save_checkpoint
from spectrue.workers.training.config import TrainConfig
from spectrue.workers.training.corpus import Corpus
from spectrue.workers.training.eagle3 import HeadShape, TrainableHead, choose_aux_layers
from spectrue.workers.training.features import FeatureMaker
from spectrue.workers.training.initial import initial_weights
from spectrue.workers.training.vocabulary import HotVocab, choose_vocab

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """Of the steps since the last; acceptance by unrolled step, as if those before were right."""

    step: int
    steps: int  # expected in all
    loss: float
    greedy: tuple[float, ...]  # the head's argmax is the target's
    overlap: tuple[float, ...]  # sum(min(target, draft)): what `rejection` accepts at T = 1
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    head: TrainableHead
    vocab: HotVocab
    step: int
    finished: bool  # False: it was interrupted and can be resumed
    seconds: float
    held_out: TrainProgress | None  # measured on what was not trained on


class Trainer:
    """One head of one target. Raises ConfigError for a corpus that is too small."""

    def __init__(
        self,
        config: TrainConfig,
        target: Model,
        corpus: Corpus,
        out: Path,
        report: Callable[[TrainProgress], None],
    ) -> None:
        if len(corpus) <= config.held_out:
            raise ConfigError(
                f"the corpus has {len(corpus)} conversations, held_out = {config.held_out} of them"
            )
        self.config, self.target, self.corpus, self.out = config, target, corpus, out
        self.report = report
        self.device = target.device
        shape = target.config
        self.vocab = choose_vocab(
            corpus, config.draft_vocab_size, shape.vocab_size, shape.eos_token_ids
        )
        target.aux_layers = choose_aux_layers(shape.num_layers)
        self.bf16 = self.device.type == "cuda"
        self.features = FeatureMaker(
            target, self.vocab.target_ids, torch.bfloat16 if self.bf16 else torch.float32
        )
        self.head = TrainableHead(
            HeadShape(
                target=shape,
                aux_layers=target.aux_layers,
                draft_vocab_size=len(self.vocab.target_ids),
                intermediate_size=config.intermediate_size or shape.intermediate_size,
            ),
            self.device,
            config.seed,
        )
        self.head.load_published(initial_weights(target, self.head.published(), self.vocab))
        self.optimizers = make_optimizers(config, self.head)
        self.loss_of = torch.compile(law_loss) if config.compile else law_loss
        self.step, self.spent = 0, 0.0
        self._started = time.perf_counter()

    # -- running ----------------------------------------------------------------------------------

    def run(self, resume: bool, stopped: Callable[[], bool] = lambda: False) -> TrainResult:
        """Train to the end, or to the step in which `stopped`. A checkpoint is left either way."""
        path = self.out / "checkpoint.pt"
        if resume and path.exists():
            self.step, self.spent = load_checkpoint(
                path, self.config, self.head, self.optimizers, self.vocab
            )
        self._started = time.perf_counter() - self.spent
        window = _Window(self.config.num_unrolled, self.device)
        for batches in self._batches():
            self._train(batches, window)
            self.step += 1
            if self.step % self.config.report_every == 0:
                self.report(window.take(self))
            ends = self._fraction() >= 1 or stopped()
            if ends or self.step % self.config.checkpoint_every == 0:
                self.save(path)
            if ends:
                break
        finished = self._fraction() >= 1
        held_out = self.evaluate() if finished else None
        return TrainResult(
            head=self.head,
            vocab=self.vocab,
            step=self.step,
            finished=finished,
            seconds=self.seconds,
            held_out=held_out,
        )

    def save(self, path: Path) -> None:
        save_checkpoint(
            path, self.config, self.head, self.optimizers, self.vocab, self.step, self.seconds
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def _fraction(self) -> float:
        """How much of the training is done."""
        if self.config.time_limit is not None:
            return self.seconds / self.config.time_limit
        return self.step / self.config.steps

    def _batches(self) -> Iterator[list[Batch]]:
        """From where the run is, for ever; the next ones are made while the device works."""
        config, first = self.config, range(self.config.held_out, len(self.corpus))
        max_tokens = config.tokens_per_step // config.accumulate

        def groups() -> Iterator[list[list[int]]]:
            number, to_skip = 0, self.step
            while True:
                batches = epoch(
                    self.corpus,
                    first,
                    max_length=config.max_length,
                    max_tokens=max_tokens,
                    seed=f"{config.seed}-{number}",
                )
                number += 1
                size = config.accumulate
                for at in range(0, max(len(batches) - size + 1, 1), size):
                    if to_skip:
                        to_skip -= 1
                        continue
                    yield batches[at : at + size]

        def make(group: list[list[int]]) -> list[Batch]:
            steps = config.num_unrolled
            return [make_batch(self.corpus, batch, config.max_length, steps) for batch in group]

        with ThreadPoolExecutor(1) as pool:
            ahead = groups()
            waiting = [pool.submit(make, next(ahead)) for _ in range(3)]
            while True:
                waiting.append(pool.submit(make, next(ahead)))
                yield waiting.pop(0).result()

    # -- one step ---------------------------------------------------------------------------------

    def _train(self, batches: list[Batch], window: _Window) -> None:
        config = self.config
        measures = (self.step + 1) % config.report_every == 0
        num_tokens = sum(batch.num_answer_tokens for batch in batches)
        for batch in batches:
            loss = self._loss(batch, max(num_tokens, 1), window, measures)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip_norm)
        rate = config.learning_rate * schedule(self.step, config.warm_up_steps, self._fraction())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, batch: Batch, num_tokens: int, window: _Window, measures: bool) -> Tensor:
        config, steps = self.config, self.config.num_unrolled
        features = self.features(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            aux = features.aux.view(*batch.token_ids.shape, -1)
            hidden = self.head.unroll(aux, self._embedded(batch, steps), steps)
            total = features.aux.new_zeros((), dtype=torch.float32)
            share = total + config.overlap_share * min(1.0, 2 * self._fraction())
            weights = [config.unroll_decay**j for j in range(steps)]
            for j, rows in enumerate(hidden):
                at, law_at = self._move(batch.judged[j]), self._move(batch.law_at(j))
                logits = F.linear(
                    rows.flatten(0, 1).index_select(0, at), self.head.weight("lm_head.weight")
                )
                law = features.hot_logits.index_select(0, law_at)
                normalizer = features.log_normalizer.index_select(0, law_at)
                loss = self.loss_of(logits, law, normalizer, share)
                total = total + weights[j] / sum(weights) * loss / num_tokens
                if measures:
                    best = features.argmax.index_select(0, law_at)
                    window.measure(j, logits.detach(), law, normalizer, best, self.features.hot)
        window.add(total.detach(), batch.num_answer_tokens)
        return total

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # else the copy waits for all that is enqueued
        return tensor.to(self.device, non_blocking=True)

    @torch.no_grad()
    def _embedded(self, batch: Batch, steps: int) -> Tensor:
        """Row i is of token i + 1, as far as the last step reads."""
        ids = self._move(F.pad(batch.token_ids[:, 1:], (0, steps + 1)))
        rows = self.target.embed(ids.flatten())
        return rows.view(*ids.shape, -1).to(self.features.dtype)

    @torch.no_grad()
    def evaluate(self) -> TrainProgress:
        """The same measures on the conversations held out."""
        window = _Window(self.config.num_unrolled, self.device)
        max_tokens = self.config.tokens_per_step // self.config.accumulate
        for indices in epoch(
            self.corpus,
            range(self.config.held_out),
            max_length=self.config.max_length,
            max_tokens=max_tokens,
            seed="held out",
        ):
            steps = self.config.num_unrolled
            batch = make_batch(self.corpus, indices, self.config.max_length, steps)
            self._loss(batch, max(batch.num_answer_tokens, 1), window, measures=True)
        return window.take(self)


def law_loss(
    logits: Tensor,  # [N, draft vocabulary], the head's
    target_logits: Tensor,  # [N, draft vocabulary]
    log_normalizer: Tensor,  # [N], of the target over its whole vocabulary
    overlap_share: Tensor,  # []
) -> Tensor:
    """Sum over rows: cross entropy with the target's law, and in part -log of the overlap.

    The overlap, sum(min(target, draft)), is what `rejection` accepts, so a small head shall spend
    itself on that; far from the target its gradient says little, so the cross entropy comes first.
    What the law has outside the draft vocabulary counts for nothing: a row that can hardly be
    drafted weighs little.
    """
    draft_logprobs = logits.float().log_softmax(-1)
    target_probs = (target_logits.float() - log_normalizer[:, None]).exp()
    entropy = -(target_probs * draft_logprobs).sum(-1)
    overlap = torch.minimum(target_probs, draft_logprobs.exp()).sum(-1)
    missed = -target_probs.sum(-1) * (overlap + 1e-4).log()
    return torch.lerp(entropy, missed, overlap_share).sum()


def schedule(step: int, warm_up_steps: int, fraction: float) -> float:
    """Of the learning rate: up in `warm_up_steps`, then down as half a cosine."""
    rising = min(1.0, (step + 1) / max(warm_up_steps, 1))
    return rising * 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


def make_optimizers(config: TrainConfig, head: TrainableHead) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices inside and AdamW for the rest."""
    named = dict(head.named_parameters())
    inner = [p for n, p in named.items() if p.dim() == 2 and not n.startswith("lm_head")]
    if config.optimizer == "adamw":
        inner = []
    chosen = {id(p) for p in inner}
    rest = [p for p in named.values() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=rest[0].is_cuda,
        )
    ]
    if inner:
        options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
        found.append(
            torch.optim.Muon(
                inner, lr=config.learning_rate, weight_decay=config.weight_decay, **options
            )
        )
    return found


class _Window:
    """Sums since the last report, on the device: reading them is a synchronisation."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._clear()

    def _clear(self) -> None:
        self._loss: list[Tensor] = []
        self._tokens = 0
        self._sums = torch.zeros(self._steps, 3, device=self._device, dtype=torch.float64)
        self._start = time.perf_counter()

    def add(self, loss: Tensor, num_tokens: int) -> None:
        self._loss.append(loss)
        self._tokens += num_tokens

    @torch.no_grad()
    def measure(
        self,
        j: int,
        logits: Tensor,  # [N, draft vocabulary], the head's
        target_logits: Tensor,  # the same, the target's
        log_normalizer: Tensor,  # [N]
        argmax: Tensor,  # [N] target ids
        hot: Tensor,  # [draft vocabulary] target ids
    ) -> None:
        """Rows are judged in parts, for memory."""
        for q, p, norm, best in zip(
            logits.split(8192),
            target_logits.split(8192),
            log_normalizer.split(8192),
            argmax.split(8192),
            strict=True,
        ):
            law = q.float().softmax(-1)
            overlap = torch.minimum(law, (p.float() - norm[:, None]).exp()).sum()
            right = (hot[law.argmax(-1)] == best).sum()
            self._sums[j] += torch.stack(
                (right.double(), overlap.double(), torch.full_like(overlap, len(q)).double())
            )

    def take(self, trainer: Trainer) -> TrainProgress:
        right, overlap, rows = self._sums.clamp(min=1e-9).t().tolist()
        tokens = self._tokens
        loss = float(torch.stack(self._loss).mean())
        seconds, fraction = time.perf_counter() - self._start, max(trainer._fraction(), 1e-9)
        self._clear()
        return TrainProgress(
            step=trainer.step,
            steps=max(trainer.step, round(trainer.step / fraction)),
            loss=loss,
            greedy=tuple(a / n for a, n in zip(right, rows, strict=True)),
            overlap=tuple(a / n for a, n in zip(overlap, rows, strict=True)),
            tokens_per_second=tokens / seconds,
            seconds_left=trainer.seconds * max(1 / fraction - 1, 0),
        )
