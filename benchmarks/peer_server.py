"""vLLM's OpenAI-compatible server for benchmarks/peer.py. It takes new weights from a file, by the
backend that Headrace's own engines have.

Started as `peer_server.py --model MODEL …`: what follows is vLLM's command line.
"""

from vllm.entrypoints.launchers.api_server.entry import main

from services.generator import weight_backend

if __name__ == "__main__":
    weight_backend.register()
    main()
