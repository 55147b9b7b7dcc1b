// What k6 asks of a daemon with the demo's data (.ci/load-generators): blocks over gRPC and HTTP, each compared with the file's.
import { check } from 'k6';
import { sha256 } from 'k6/crypto';
import { b64decode } from 'k6/encoding';
import http from 'k6/http';
import grpc from 'k6/net/grpc';

const expected = JSON.parse(open(__ENV.EXPECTED));
const authority = __ENV.CA && open(__ENV.CA);
const headers = __ENV.TOKEN ? { authorization: `Bearer ${__ENV.TOKEN}` } : {};
const BLOCK = 4096;
const BATCH = 8;
const scenario = (exec) => ({ executor: 'constant-vus', vus: 8, duration: `${__ENV.SECONDS}s`, exec });

export const options = {
  scenarios: { unary: scenario('unary'), stream: scenario('stream'), web: scenario('web') },
  thresholds: { checks: ['rate==1'] },
};

const client = new grpc.Client();
const any = () => Math.floor(Math.random() * expected.length);
const some = (count) => Array.from({ length: count }, any);

// Whether these bytes are these blocks, back to back.
function right(bytes, indices) {
  return bytes.byteLength === indices.length * BLOCK
    && indices.every((index, at) => sha256(bytes.slice(at * BLOCK, (at + 1) * BLOCK), 'hex') === expected[index]);
}

// A connection for each virtual user.
function connect() {
  if (__ITER === 0) {
    const security = authority ? { tls: { cacerts: [authority] } } : { plaintext: true };
    client.connect(__ENV.GRPC.split('//')[1], { reflect: true, reflectMetadata: headers, ...security });
  }
}

export function unary() {
  connect();
  const indices = some(BATCH);
  const found = client.invoke('ringfetch.v1.FetchService/FetchBlocks', { dataset: 'blocks', indices }, { metadata: headers });
  check(found, { 'FetchBlocks: the bytes': (found) => found.status === grpc.StatusOK && right(b64decode(found.message.data), indices) });
  const missing = client.invoke('ringfetch.v1.FetchService/FetchBlocks', { dataset: 'none', indices }, { metadata: headers });
  check(missing, { 'FetchBlocks: no such dataset': (missing) => missing.status === grpc.StatusNotFound });
}

export function stream() {
  connect();
  const calls = new grpc.Stream(client, 'ringfetch.v1.FetchService/FetchStream', { metadata: headers });
  const wanted = Array.from({ length: 32 }, () => some(1));
  const seen = new Set();
  return new Promise((resolve) => {
    calls.on('data', (found) => {
      const id = Number(found.id);
      seen.add(id);
      check(found, { 'FetchStream: the bytes': (found) => right(b64decode(found.blocks.data), wanted[id]) });
    });
    calls.on('error', (error) => check(error, { 'FetchStream: no error': () => false }));
    calls.on('end', () => {
      check(seen, { 'FetchStream: a response for each request': (seen) => seen.size === wanted.length });
      resolve();
    });
    wanted.forEach((indices, id) => calls.write({ id, blocks: { dataset: 'blocks', indices } }));
    calls.end();
  });
}

export function web() {
  const dataset = `${__ENV.HTTP}/v1/datasets/blocks`;
  const binary = { headers, responseType: 'binary' };
  const index = any();
  const one = http.get(`${dataset}/blocks/${index}`, binary);
  check(one, { 'GET of a block': (one) => one.status === 200 && right(one.body, [index]) });
  const again = http.get(`${dataset}/blocks/${index}`, { headers: { ...headers, 'if-none-match': one.headers.Etag } });
  check(again, { 'GET with its tag': (again) => again.status === 304 });
  const ranged = http.get(`${dataset}/bytes`, { ...binary, headers: { ...headers, range: `bytes=${index * BLOCK}-${(index + 1) * BLOCK - 1}` } });
  check(ranged, { 'GET of a range': (ranged) => ranged.status === 206 && right(ranged.body, [index]) });
  const indices = some(BATCH);
  const batch = http.post(`${dataset}/blocks:batchFetch`, JSON.stringify({ indices }), { ...binary, headers: { ...headers, 'content-type': 'application/json' } });
  check(batch, { 'POST of a batch': (batch) => batch.status === 200 && right(batch.body, indices) });
  const past = http.get(`${dataset}/blocks/${2 ** 52}`, { headers });
  check(past, { 'GET past the end': (past) => past.status === 404 });
}
