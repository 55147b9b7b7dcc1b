"""The ten nearest of 1000 candidates to a query: ranked by the daemon, then by numpy from fetched vectors, and compared.

    pip install -r clients/python/requirements.txt
    python examples/scores.py [ADDRESS]

Two queries share their candidates, which the daemon reads once. What it sends is ids and scores: some 200 bytes a query
in place of 512,000.
"""

import sys
from pathlib import Path

import numpy as np

# The client is a file of this repository, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients/python"))
from ringfetch_client import Client

CANDIDATES, LIMIT = 1000, 10


def numpy_scores(metric, query, vectors):
    """The score of each row, in float64."""
    query, vectors = query.astype(np.float64), vectors.astype(np.float64)
    match metric:
        case "dot":
            return vectors @ query
        case "cosine":
            return vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))
        case "euclidean":
            return np.linalg.norm(vectors - query, axis=1)
        case "manhattan":
            return np.abs(vectors - query).sum(axis=1)


def main():
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7410"
    random = np.random.default_rng(7)
    with Client(address) as client:
        ids = random.choice(65_536, CANDIDATES, replace=False)
        vectors = client.fetch_vectors("vectors", ids).values
        queries = random.standard_normal((2, vectors.shape[1]), dtype=np.float32)
        for metric in ("dot", "cosine", "euclidean", "manhattan"):
            rankings = client.score_vectors("vectors", [(query, ids) for query in queries], metric, LIMIT)
            for number, (query, ranking) in enumerate(zip(queries, rankings, strict=True)):
                scores = numpy_scores(metric, query, vectors)
                order = np.lexsort((ids, -scores if metric in ("dot", "cosine") else scores))[:LIMIT]
                if not (ranking.ids == ids[order]).all() or not np.allclose(ranking.scores, scores[order], rtol=1e-12, atol=1e-12):
                    sys.exit(f"{metric}: the daemon says {ranking}, and numpy {ids[order]}, {scores[order]}")
                print(f"{metric}, query {number}: vector {ranking.ids[0]} is nearest ({ranking.scores[0]:.6f}); numpy agrees on {LIMIT}")


if __name__ == "__main__":
    main()
