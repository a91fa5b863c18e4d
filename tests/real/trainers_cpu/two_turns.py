"""An agent of two turns, with an HTTP client of its own: ``--custom-agent-function-path two_turns.run``.

It asks for something, answers what came, and asks again, through the session that Miles gives it.
"""

import asyncio
import random

import httpx

# A policy that is nearly random then ends most answers itself, as the session server wants it.
STOP = list(range(3, 256, 12))
PATIENCE = 240


async def run(base_url, prompt, request_kwargs=None, metadata=None, **_):
    messages = [{"role": "user", "content": prompt}]
    asked = {**(request_kwargs or {}), "model": "policy", "stop_token_ids": STOP}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        for turn in (1, 2):
            answer = await ask(client, f"{base_url}/v1/chat/completions", {**asked, "messages": messages})
            choice = answer["choices"][0]
            if choice["finish_reason"] != "stop":
                break
            messages += [choice["message"], {"role": "user", "content": f"and {turn}?"}]
    # "stitch" is what no agent should say; it must not stand for what made the tokens.
    return {"reward": random.random(), "turns": turn, "stitch": "an agent's own"}


async def reward(args, samples, **_):
    """Of those that the agent has not rewarded, as Miles asks it: one, or all of a trajectory."""
    return [0.0 for _ in samples] if isinstance(samples, list) else 0.0


async def ask(client, url, body):
    """As OpenAI's clients do, it asks again when it is told to."""
    for _ in range(5):
        response = await client.post(url, json=body, headers={"authorization": "Bearer none"})
        if response.status_code not in (409, 429, 500, 502, 503):
            break
        await asyncio.sleep(1)
    response.raise_for_status()
    return response.json()
