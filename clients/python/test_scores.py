"""Checks the scores of a running demo daemon against numpy, in float64, and against faiss: exact inner product and L2.

    pip install -r requirements.txt faiss-cpu
    python test_scores.py --grpc 127.0.0.1:7410
"""

import argparse
import sys
import unittest

import faiss
import numpy as np
from ringfetch_client import Client

CANDIDATES, LIMIT, QUERIES = 4000, 100, 5
# faiss adds up in float32: of the sum of the terms' magnitudes.
FAISS_ERROR = 1e-5

address = "127.0.0.1:7410"


class Scores(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = Client(address)
        cls.addClassCleanup(cls.client.close)
        cls.client.wait_until_ready()
        random = np.random.default_rng(42)
        cls.ids = np.sort(random.choice(65_536, CANDIDATES, replace=False))
        cls.vectors = cls.client.fetch_vectors("vectors", cls.ids).values
        cls.queries = random.standard_normal((QUERIES, cls.vectors.shape[1]), dtype=np.float32)

    def rankings(self, metric, limit=LIMIT):
        return [self.client.score_vectors("vectors", [(query, self.ids)], metric, limit)[0] for query in self.queries]

    def agrees_with_faiss(self, index, metric, key):
        """`key` makes of our scores what faiss compares by. Ids may only differ where float32 cannot tell scores apart."""
        index.add(np.ascontiguousarray(self.vectors))
        values, places = index.search(self.queries, LIMIT)
        self.assertTrue((places >= 0).all())
        everything = self.rankings(metric, CANDIDATES)
        for query, ranking, value, place in zip(self.queries, everything, values, places, strict=True):
            magnitude = np.abs(query).sum() * np.abs(self.vectors).max() * 4
            np.testing.assert_allclose(key(ranking.scores[:LIMIT]), value, atol=FAISS_ERROR * magnitude)
            of_id = dict(zip(ranking.ids.tolist(), key(ranking.scores), strict=True))
            ours = np.array([of_id[vector_id] for vector_id in self.ids[place].tolist()])
            np.testing.assert_allclose(ours, value, atol=FAISS_ERROR * magnitude)
            self.assertGreater(len(set(ranking.ids[:LIMIT].tolist()) & set(self.ids[place].tolist())), LIMIT * 0.98)

    def test_inner_product_is_that_of_faiss(self):
        self.agrees_with_faiss(faiss.IndexFlatIP(self.vectors.shape[1]), "dot", lambda scores: scores)

    def test_euclidean_distance_is_that_of_faiss(self):
        # faiss leaves out the root.
        self.agrees_with_faiss(faiss.IndexFlatL2(self.vectors.shape[1]), "euclidean", np.square)

    def test_scores_are_those_of_numpy_in_float64(self):
        vectors = self.vectors.astype(np.float64)
        for metric, of in {
            "dot": lambda query: -(vectors @ query),
            "cosine": lambda query: -(vectors @ query) / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)),
            "euclidean": lambda query: np.linalg.norm(vectors - query, axis=1),
            "manhattan": lambda query: np.abs(vectors - query).sum(axis=1),
        }.items():
            for query, ranking in zip(self.queries, self.rankings(metric), strict=True):
                distances = of(query.astype(np.float64))
                order = np.lexsort((self.ids, distances))[:LIMIT]
                self.assertEqual(ranking.ids.tolist(), self.ids[order].tolist(), metric)
                np.testing.assert_allclose(np.abs(ranking.scores), np.abs(distances[order]), rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc", default=address)
    options, rest = parser.parse_known_args()
    address = options.grpc
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
