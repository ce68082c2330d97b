// Answers of llama.cpp for tests/hf/gguf/test_llama_cpp.py, by the npm package node-llama-cpp.
//
//     node llama_cpp.mjs NODE_MODULES QUESTION.json ANSWER.json
//
// The question has `model` and `lora` (paths or null), `prompts` (texts), `count` (tokens of each
// answer) and `text`. The answer has the tokens of each prompt, the greedy tokens after it, the
// tokens of the text and their mean negative log-likelihood.
import {readFileSync, writeFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [modules, question, answer] = process.argv.slice(2);
const entry = `${modules}/node-llama-cpp/dist/index.js`;
const {getLlama} = await import(pathToFileURL(entry).href);
const asked = JSON.parse(readFileSync(question, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: asked.model});
const lora = asked.lora === null ? undefined : {adapters: [{filePath: asked.lora}]};
const context = await model.createContext({contextSize: 512, lora, threads: 1});
const sequence = context.getSequence();

const prompts = asked.prompts.map((prompt) => model.tokenize(prompt));
const greedy = [];
for (const prompt of prompts) {
    await sequence.clearHistory();
    const tokens = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length >= asked.count) break;
    }
    greedy.push(tokens);
}

await sequence.clearHistory();
// Without these options only the likeliest tokens would count.
const options = {temperature: 1, topK: 0, topP: 1, minP: 0};
const text = model.tokenize(asked.text);
const items = text.map((token) => [token, {generateNext: {probabilities: true, options}}]);
const found = await sequence.controlledEvaluate(items);
let loss = 0;
for (let index = 0; index + 1 < text.length; index++) {
    loss -= Math.log(found[index].next.probabilities.get(text[index + 1]));
}
writeFileSync(answer, JSON.stringify({prompts, greedy, text, loss: loss / (text.length - 1)}));
await llama.dispose();
