#!/usr/bin/env bash
# Usage: examples/curl.sh [URL]
# One block and a batch of three vectors over HTTP, with curl and jq. The second id is past the end: it fails alone.
set -euo pipefail
url=${1:-http://127.0.0.1:7411}

# Prints the length and the first 8 bytes of standard input.
describe() { od -A n -v -t x1 -w4096 | awk '{ n += NF; for (i = 1; i <= NF && n - NF + i <= 8; i++) head = head $i } END { print n " bytes, " head }'; }

echo "block 7: $(curl -sf "$url/v1/datasets/blocks/blocks/7" | describe)"

# In JSON the items that were read are in `data`, back to back, in base64. Without the Accept header the answer is those
# bytes alone.
answer=$(curl -sf -H 'Accept: application/json' --json '{"ids": [17, 65536, 5]}' "$url/v1/datasets/vectors/vectors:batchFetch")
bytes() { jq -r .data <<<"$answer" | base64 -d; }
echo "vector 17: $(bytes | head -c 512 | describe)"
jq -r '.errors[] | "vector 65536: \(.message)"' <<<"$answer"
echo "vector 5: $(bytes | tail -c 512 | describe)"
