#!/usr/bin/env python3
"""Makes the candidates of the study `ringfetch lab rescore`: for each query the nearest vectors of a quantised copy (int8), by
faiss, and the scores that the best of them have with the vectors themselves. Needs numpy and faiss-cpu.

    python3 bench/candidates.py DIR/ringfetch-lab-data/vectors-5000000x768.f32

The result lies beside the vectors, under the same name with the ending `.candidates` (crates/lab/src/questions.rs).
"""

import argparse
import json
import os
import re
import sys

CHUNK = 1 << 15


def whole(text, least=1):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vectors", help="the file that `ringfetch lab rescore` has made")
    parser.add_argument("--queries", type=whole, default=200)
    parser.add_argument("--limit", type=whole, default=100, help="results of a query")
    parser.add_argument("--oversampling", type=lambda text: [whole(word) for word in text.split(",")], default="1,4",
                        help="candidates for each result")
    parser.add_argument("--seed", type=lambda text: whole(text, 0), default=7, help="of the queries")
    return parser.parse_args()


def shape(args):
    """How many vectors of how many elements the file has; ends with the problem if they are not those asked for."""
    name = re.fullmatch(r"vectors-([1-9]\d*)x([1-9]\d*)\.f32", os.path.basename(args.vectors))
    if not name:
        sys.exit("candidates: the file's name is not vectors-COUNTxDIM.f32")
    count, dim = (int(number) for number in name.groups())
    if not os.path.isfile(args.vectors):
        sys.exit(f"candidates: {args.vectors}: no such file; `ringfetch lab rescore --vectors {count}` makes it")
    length = os.path.getsize(args.vectors)
    if length != count * dim * 4:
        sys.exit(f"candidates: {args.vectors}: has {length} bytes, not the {count * dim * 4} of {count} vectors of {dim} f32")
    candidates = args.limit * max(args.oversampling)
    if candidates > count:
        sys.exit(f"candidates: {candidates} for each query are more than {count} vectors")
    if args.queries > count:
        sys.exit(f"candidates: --queries {args.queries}: more than {count} vectors")
    return count, dim


def main():
    args = arguments()
    count, dim = shape(args)
    try:
        import faiss
        import numpy as np
    except ImportError as error:
        sys.exit(f"candidates: needs the Python packages numpy and faiss-cpu: {error}")
    try:
        write(args, count, dim, faiss, np)
    except OSError as error:
        sys.exit(f"candidates: {error}")


def write(args, count, dim, faiss, np):
    over = args.oversampling
    candidates = args.limit * max(over)
    vectors = np.memmap(args.vectors, dtype="<f4", mode="r", shape=(count, dim))
    # Near a vector, but not equal to one.
    random = np.random.default_rng(args.seed)
    near = vectors[np.sort(random.choice(count, args.queries, replace=False))].astype("<f4")
    queries = near + random.normal(0, 0.3 / dim**0.5, near.shape).astype("<f4")
    queries = np.ascontiguousarray(queries / np.linalg.norm(queries, axis=1, keepdims=True), dtype="<f4")

    index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    index.train(np.ascontiguousarray(vectors[:: max(1, count // CHUNK)]))
    for begin in range(0, count, CHUNK):
        index.add(np.ascontiguousarray(vectors[begin : begin + CHUNK]))
        print(f"\rquantised {index.ntotal} of {count}", end="", file=sys.stderr)
    print(file=sys.stderr)
    _, ids = index.search(queries, candidates)

    head = {
        "format": "ringfetch-lab-candidates/1",
        "dim": dim,
        "count": count,
        "queries": args.queries,
        "limit": args.limit,
        "oversampling": over,
        "made_by": f"faiss {faiss.__version__}, int8 scalar quantiser, inner product, query seed {args.seed}",
    }
    path = os.path.splitext(args.vectors)[0] + ".candidates"
    with open(path + ".part", "wb") as out:
        out.write(json.dumps(head).encode() + b"\n")
        for query, near in zip(queries, ids, strict=True):
            scores = vectors[near].astype("f8") @ query.astype("f8")
            out.write(query.tobytes() + near.astype("<u4").tobytes())
            for each in over:
                best = np.sort(scores[: args.limit * each])[::-1][: args.limit]
                out.write(best.astype("<f4").tobytes())
        out.flush()
        os.fsync(out.fileno())
    os.rename(path + ".part", path)
    print(path)


if __name__ == "__main__":
    main()
