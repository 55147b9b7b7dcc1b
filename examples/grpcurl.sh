#!/usr/bin/env bash
# Usage: examples/grpcurl.sh [ADDRESS]
# One block and a batch of three vectors over gRPC, with grpcurl and jq; the daemon's reflection describes the messages.
# The second id is past the end: it fails alone.
set -euo pipefail
address=${1:-127.0.0.1:7410}

# Prints the length and the first 8 bytes of standard input.
describe() { od -A n -v -t x1 -w4096 | awk '{ n += NF; for (i = 1; i <= NF && n - NF + i <= 8; i++) head = head $i } END { print n " bytes, " head }'; }

# Usage: fetch METHOD REQUEST
fetch() { grpcurl -plaintext -d "$2" "$address" "ringfetch.v1.FetchService/$1"; }

echo "block 7: $(fetch FetchBlocks '{"dataset": "blocks", "indices": [7]}' | jq -r .data | base64 -d | describe)"

# The items that were read are in `data`, back to back.
answer=$(fetch FetchVectors '{"dataset": "vectors", "ids": [17, 65536, 5]}')
bytes() { jq -r .data <<<"$answer" | base64 -d; }
echo "vector 17: $(bytes | head -c 512 | describe)"
jq -r '.errors[] | "vector 65536: \(.message)"' <<<"$answer"
echo "vector 5: $(bytes | tail -c 512 | describe)"
