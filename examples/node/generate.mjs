// Streams a completion, requests it again with a unary call, and shows an error. From a checkout:
//   npm install --prefix examples/node
//   node examples/node/generate.mjs 127.0.0.1:9000 "once upon a time"
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const [address = '127.0.0.1:9000', text = 'once upon a time'] = process.argv.slice(2);
const protos = process.env.PROTOS
  ?? path.join(path.dirname(fileURLToPath(import.meta.url)), '..', '..', 'protos');
const definition = protoLoader.loadSync('preamble/v1/generation.proto', {
  includeDirs: [protos],
  keepCase: true,
  longs: String, // A seed has 64 bits; a JavaScript number is exact up to 53 bits.
  enums: String,
  defaults: true,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).preamble.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure(), {
  'grpc.keepalive_time_ms': 25_000,
});
const deadline = () => ({ deadline: Date.now() + 20_000 });

async function callStreaming(request) {
  let text = '';
  for await (const part of client.GenerateStream(request, deadline())) {
    text += part.text;
    if (part.finish_reason !== 'FINISH_REASON_UNSPECIFIED') {
      return { text, finish_reason: part.finish_reason, usage: part.usage };
    }
  }
  throw new Error('the stream ended without a finish reason');
}

function callUnary(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, deadline(), (error, response) =>
      error ? reject(error) : resolve(response));
  });
}

const request = { text, max_new_tokens: 8 };
const streamed = await callStreaming(request);
const response = await callUnary('Generate', request);
console.log(JSON.stringify({ streamed: streamed.text, whole: response.text, usage: response.usage }));
try {
  await callUnary('Generate', { text, sampling: { temperature: -1 } });
} catch (error) {
  console.log(JSON.stringify({ code: grpc.status[error.code], message: error.details }));
}
client.close();
