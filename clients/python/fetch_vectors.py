"""Fetches vectors by id and prints their shape, their first elements and their norms.

    python fetch_vectors.py --dataset vectors 17 60312 5
"""

import argparse
import sys

import grpc
import numpy as np
from ringfetch_client import Client


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch vectors from a ringfetchd into a numpy array.")
    parser.add_argument("--grpc", default="127.0.0.1:7410", metavar="ADDRESS")
    parser.add_argument("--dataset", default="vectors")
    parser.add_argument("ids", type=int, nargs="+")
    arguments = parser.parse_args()
    with Client(arguments.grpc) as client:
        try:
            answer = client.fetch_vectors(arguments.dataset, arguments.ids)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"{answer.values.shape[0]} vectors of {answer.values.shape[1]} x {answer.values.dtype}")
    for vector_id, values in zip(np.asarray(arguments.ids)[answer.present], answer.values, strict=True):
        print(f"{vector_id}: {values[:4]} ... norm {np.linalg.norm(values.astype(np.float64)):.6f}")
    for item, code, message in answer.errors:
        print(f"{arguments.ids[item]}: {message} (code {code})", file=sys.stderr)
    return 1 if answer.errors else 0


if __name__ == "__main__":
    sys.exit(main())
