// Seconds and memory of GGUF files in llama.cpp, by the npm package node-llama-cpp.
//
//     node llama_cpp.mjs NODE_MODULES < REQUEST.json
//
// The request has `models` (paths), `prompt` (token ids), `newTokens`, `turns` and `threads`. The
// answer has the seconds of the prompt and of each token by model and turn, and for a single model
// the bytes that loading it and reading the prompt adds to this process.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const modules = process.argv[2];
const {getLlama} = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`).href);
const request = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({
    gpu: false, build: "never", logLevel: "error", maxThreads: request.threads
});
const contextSize = request.prompt.length + request.newTokens + 8;
const before = process.memoryUsage().rss;
const sequences = [];
for (const modelPath of request.models) {
    const model = await llama.loadModel({modelPath});
    const context = await model.createContext({
        contextSize, batchSize: contextSize, threads: request.threads
    });
    sequences.push(context.getSequence());
}

async function secondsOf(sequence) {
    await sequence.clearHistory();
    const started = performance.now();
    let read = started;
    let count = 0;
    // A model may end its text early; without this option it would then write fewer tokens.
    const options = {temperature: 0, yieldEogToken: true};
    for await (const token of sequence.evaluate(request.prompt, options)) {
        if (count === 0) read = performance.now();
        if (count === request.newTokens) break;
        count++;
    }
    return {
        prefill: (read - started) / 1000,
        decode: (performance.now() - read) / 1000 / count,
        tokens: count
    };
}

const seconds = sequences.map(() => []);
// The first turn reads the files into memory and is left out.
for (let turn = 0; turn <= request.turns; turn++) {
    for (let index = 0; index < sequences.length; index++) {
        const found = await secondsOf(sequences[index]);
        if (turn > 0) seconds[index].push(found);
    }
}
process.stdout.write(JSON.stringify({seconds, memory: process.memoryUsage().rss - before}) + "\n");
await llama.dispose();
