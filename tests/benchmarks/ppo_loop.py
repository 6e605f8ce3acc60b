"""Proximal policy optimization written out by hand, in one process: what the expert's training is held against."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import log_softmax

from concord.reinforcement.actor_critic import ActorCritic
from concord.reinforcement.advantages import RewardScale, advantages
from concord.reinforcement.procgen_environment import ProcgenVectorEnv


@dataclass(frozen=True)
class Settings:
    """Of the loop; the defaults are those that Cobbe et al. publish."""

    environments: int = 64
    steps: int = 256
    epochs: int = 3
    minibatches: int = 8
    lr: float = 5e-4
    discount: float = 0.999
    decay: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    largest_norm: float = 0.5
    precision: torch.dtype = torch.bfloat16


def loop(settings: Settings, network: ActorCritic, batches: int, after: Callable[[int, float, float], None]) -> None:
    """Train for so many batches; ``after`` gets environment steps, mean return of late episodes and seconds so far."""
    environment = ProcgenVectorEnv(settings.environments, seed=0)
    optimizer = torch.optim.Adam(network.parameters(), settings.lr, eps=1e-5)
    scale = RewardScale(settings.discount)
    frames, _ = environment.reset()
    shape = (settings.steps, settings.environments)
    seen = np.empty((*shape, *frames.shape[1:]), np.uint8)
    chosen, values, log_probabilities = (
        np.empty(shape, np.int64),
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
    )
    rewards, ends = np.empty(shape, np.float32), np.empty(shape, np.bool_)
    returns: list[float] = []
    started = time.perf_counter()
    for batch in range(batches):
        with torch.no_grad(), torch.autocast("cpu", settings.precision):
            for step in range(settings.steps):
                logits, value = network(torch.from_numpy(frames))
                scores = log_softmax(logits, 1)
                action = torch.multinomial(scores.exp(), 1)
                seen[step], chosen[step], values[step] = frames, action[:, 0], value
                log_probabilities[step] = scores.gather(1, action)[:, 0]
                frames, reward, ended, _, info = environment.step(chosen[step])
                rewards[step], ends[step] = scale(reward, ended), ended
                if ended.any():
                    returns += info["episode"]["r"][ended].tolist()
            last = network(torch.from_numpy(frames))[1].numpy()
        estimates = advantages(rewards, values, ends, last, settings.discount, settings.decay)
        targets = torch.from_numpy((estimates + values).ravel())
        normal = torch.from_numpy(((estimates - estimates.mean()) / (estimates.std() + 1e-8)).ravel())
        all_frames = torch.from_numpy(seen.reshape(-1, *frames.shape[1:]))
        actions, before = torch.from_numpy(chosen.ravel()), torch.from_numpy(log_probabilities.ravel())
        for _ in range(settings.epochs):
            for part in torch.randperm(len(targets)).chunk(settings.minibatches):
                with torch.autocast("cpu", settings.precision):
                    logits, value = network(all_frames[part])
                scores = log_softmax(logits, 1)
                ratio = (scores.gather(1, actions[part, None])[:, 0] - before[part]).exp()
                gain = torch.min(normal[part] * ratio, normal[part] * ratio.clamp(1 - settings.clip, 1 + settings.clip))
                entropy = -(scores.exp() * scores).sum(1)
                loss = -gain + settings.value * (value - targets[part]) ** 2 - settings.entropy * entropy
                optimizer.zero_grad()
                loss.mean().backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), settings.largest_norm)
                optimizer.step()
        returns = returns[-200:]
        after((batch + 1) * len(targets), float(np.mean(returns)) if returns else 0.0, time.perf_counter() - started)
