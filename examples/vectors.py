"""One block and a batch of three vectors as numpy arrays, over gRPC. The second id is past the end: it fails alone.

    pip install -r clients/python/requirements.txt
    python examples/vectors.py [ADDRESS]
"""

import sys
from pathlib import Path

import numpy as np

# The client is a file of this repository, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients/python"))
from ringfetch_client import Client


def describe(array):
    """The length and the first 8 bytes of an array."""
    data = array.tobytes()
    return f"{len(data)} bytes, {data[:8].hex()}"


def main():
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7410"
    with Client(address) as client:
        blocks, _ = client.fetch_blocks("blocks", [7])
        print(f"block 7: {describe(blocks[0])}")

        ids = [17, 65536, 5]
        answer = client.fetch_vectors("vectors", ids)
        rows, messages = iter(answer.values), {item: message for item, _, message in answer.errors}
        for item, vector_id in enumerate(ids):
            print(f"vector {vector_id}: {describe(next(rows)) if answer.present[item] else messages[item]}")

        # The rows are one array over the message's memory: numpy works on it as it is.
        unit = answer.values / np.linalg.norm(answer.values, axis=1, keepdims=True)
        print(f"cosine of 17 and 5: {unit[0] @ unit[1]:.4f}")


if __name__ == "__main__":
    main()
