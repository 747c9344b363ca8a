// Run both clients with one server: node main.mjs http://127.0.0.1:8000
import { aiSdk } from "./ai_sdk.mjs";
import { openai } from "./openai.mjs";

const [url] = process.argv.slice(2);
await openai(url);
await aiSdk(url);
