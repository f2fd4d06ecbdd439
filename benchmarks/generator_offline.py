"""The other side of benchmarks/generator.py: vLLM's own offline `LLM.generate`, in a process that
starts once, waits between rounds, and answers each line of input with a line of JSON.

Started as `generator_offline.py MODEL SETTINGS PROMPTS`: settings and prompts are JSON files. It
says {"ready": true}, and after each line {"seconds": …, "tokens": …}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Start the engine, then play a round for each line."""
    from vllm import LLM, SamplingParams
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    folder, settings, prompt_ids = Path(sys.argv[1]), *(_read(path) for path in sys.argv[2:4])
    arguments = settings["engine"]
    # The service's engine needs no process of its own for its worker on one core; nor does this.
    arguments["distributed_executor_backend"] = UniProcExecutor if settings["one_process"] else None
    engine = LLM(model=str(folder), **arguments)
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
    parameters = SamplingParams(**settings["sampling"])
    engine.generate(prompts[:64], parameters, use_tqdm=False)  # compiles
    _say(ready=True)
    for _ in sys.stdin:
        begin_s = time.perf_counter()
        outputs = engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        completions = [output.outputs[0] for output in outputs]
        assert all(len(c.logprobs.logprobs) == len(c.token_ids) for c in completions)
        _say(seconds=seconds, tokens=sum(len(each.token_ids) for each in completions))


def _read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
