"""Reinforcement learning on one elastic job: workers generate, train on the answers, and survive a kill in either.

    python examples/13_rl.py

Each step, every worker samples answers to its share of the prompts, scores them with a rule, and trains on them with
GRPO (Shao et al. 2024, arXiv:2402.03300). The task: repeat the prompt. Training uses the experts that generation used
(rollout routing replay, R3), so it computes the probabilities with which the answers were sampled. Worker 2 kills
itself while it generates in step 7, and worker 1 while it trains in step 13. The others repeat the step, generation
included: each prompt has random numbers of its own, so its answers are the same on whichever worker they are sampled.
"""

import os
import signal
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import evermoe

DIGITS, LENGTH, WIDTH, HEADS = 8, 3, 32, 4
ANSWERS, PROMPTS, STEPS = 8, 36, 24
KILLS = {"generation": (2, 7), "training": (1, 13)}
"""Of each phase: the worker that dies in it, and the step."""


class Block(nn.Module):
    """Causal attention with a cache of keys and values, and a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts_norm, self.experts = nn.RMSNorm(WIDTH), evermoe.MoE(WIDTH, 64, num_experts=6, gated=True)

    def forward(self, x, cache):
        """Return the hidden states of the tokens, and extend the cache."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.experts(self.experts_norm(x))


class Model(nn.Module):
    """A small language model of digits."""

    def __init__(self):
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens, caches=None):
        """Return logits for the token after each of `tokens`, which follow those in the caches."""
        caches = [{} for _ in self.blocks] if caches is None else caches
        start = caches[0]["k"].shape[2] if caches[0] else 0
        x = self.digits(tokens) + self.places(torch.arange(start, start + tokens.shape[1]))
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self.head(x)


def all_prompts():
    """Return all prompts, `[DIGITS ** LENGTH, LENGTH]`, in random order."""
    order = torch.randperm(DIGITS**LENGTH, generator=torch.Generator().manual_seed(0))
    return torch.cartesian_prod(*[torch.arange(DIGITS)] * LENGTH)[order]


def noise_of(prompts, step):
    """Return Gumbel noise for the answers to the prompts of these indices, `[prompts * ANSWERS, LENGTH, DIGITS]`."""
    shape = (ANSWERS, LENGTH, DIGITS)
    generators = [torch.Generator().manual_seed(1000 * step + prompt) for prompt in prompts.tolist()]
    return torch.cat([-torch.empty(shape).exponential_(generator=each).log() for each in generators])


@torch.no_grad()
def generate(model, tokens, noise):
    """Return prompts with answers, the log probabilities of the answers, and the experts of all tokens but the last."""
    caches, chances, new = [{} for _ in model.blocks], [], tokens
    with evermoe.record_routing(model) as routing:
        for place in range(LENGTH):
            logits = model(new, caches)[:, -1]
            new = (logits + noise[:, place]).argmax(1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
            chances.append(logits.log_softmax(1).gather(1, new))
    return tokens, torch.cat(chances, 1), routing.of_sequences(len(tokens)).ids


def advantages_of(tokens):
    """Return each answer's reward, the part of the prompt that it repeats; and what that is above its group's mean."""
    rewards = (tokens[:, LENGTH:] == tokens[:, :LENGTH]).float().mean(1)
    groups = rewards.view(-1, ANSWERS)
    return rewards, ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)).view(-1, 1)


def loss_of(model, tokens, chances, ids, advantages):
    """Return the loss of GRPO with the experts of the rollout, and how far its ratios are from 1."""
    with evermoe.replay_routing(model, ids):
        logits = model(tokens[:, :-1])[:, LENGTH - 1 :]
    now = logits.log_softmax(-1).gather(-1, tokens[:, LENGTH:].unsqueeze(-1)).squeeze(-1)
    ratio = (now - chances).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean(), (ratio - 1).abs().max()


def train(phases):
    """Train in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model in all workers
    worker, prompts, model = int(os.environ["LOCAL_RANK"]), all_prompts(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(prompts), batch_size=PROMPTS)
    session = evermoe.Session(
        model, optimizer, sampler, max_grad_norm=1.0, membership=evermoe.Membership(join_interval=1)
    )

    def die_in(phase, number):
        if phase in phases and (worker, number) == KILLS[phase]:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in session.steps(STEPS):
        with step as indices:
            asked = prompts[indices].repeat_interleave(ANSWERS, 0)
            tokens, chances, ids = generate(model, asked, noise_of(indices, step.number))
            die_in("generation", step.number)
            rewards, advantages = advantages_of(tokens)
            loss, drift = loss_of(model, tokens, chances, ids, advantages)
            die_in("training", step.number)
            step.backward(loss)
        if worker == 0 and step.committed and session.step % 4 == 0:
            print(
                f"step {session.step:2}: reward {rewards.mean():.2f}, ratio to the rollout 1 ± {drift:.0e}, gradient "
                f"norm {session.grad_norm:.6f}, {session.group.size} workers",
                flush=True,
            )
    if worker == 0:
        print(f"{session.step} steps committed, {sum(r.steps_lost for r in session.reports)} lost", flush=True)


def main():
    """Start the workers. Arguments are the phases in which one is killed; both by default."""
    phases = sys.argv[1:] or list(KILLS)
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", memory, __file__]
        subprocess.run([*command, *phases], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(sys.argv[1:])
    else:
        main()
