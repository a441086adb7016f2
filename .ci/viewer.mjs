// Tests the pure functions of src/memory/insight/viewer.html: `node .ci/viewer.mjs`. They need no browser.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const page = readFileSync(new URL("../src/memory/insight/viewer.html", import.meta.url), "utf8");
const [, model] = page.match(/<script id="model">(.*?)<\/script>/s);
const names = "read bytesText timeText siteText historyOf levelOf layoutOf svgOf classesOf colourOf COLOURS";
const { read, bytesText, timeText, siteText, historyOf, levelOf, layoutOf, svgOf, classesOf, colourOf, COLOURS } =
  new Function(`${model}; return { ${names.split(" ").join(", ")} };`)();

const MIB = 2 ** 20, WIDTH = 1104, HEIGHT = 470;
const site = (op, line) => ({ op, file: "src/train.rs", line, column: 9 });
const event = (micros, kind, address, bytes, site = null) =>
  ({ micros, kind, address, bytes, requested: site ? bytes - 1 : 0, stream: 2, site });
const block = (address, bytes, state, site = null) =>
  ({ address, bytes, requested: 0, state, class: null, stream: null, site, since: null });
const snapshot = ({ chunks = [], blocks = [], events = [], recorded = true }) =>
  ({ device: 1, taken_at: 5000, origin: 0n, recorded, chunks, blocks, events });
const span = ({ address, bytes, since, until }) => [address, bytes, since, until];

// Two chunks, one of them given back; a block that was there before, one that came and went, one that was freed and is
// pending, one that stays; a refusal.
const [upload, zeros] = [site("upload", 10), site("zeros", 20)];
const example = snapshot({
  chunks: [{ address: 64 * MIB, bytes: 8 * MIB }],
  blocks: [block(64 * MIB, MIB, "live"), block(65 * MIB, 4 * MIB, "live", zeros), block(69 * MIB, 2 * MIB, "pending"),
    block(71 * MIB, MIB, "free")],
  events: [event(100, "mapped", 256 * MIB, 32 * MIB), event(200, "allocated", 256 * MIB, 16 * MIB, upload),
    event(900, "allocated", 65 * MIB, 4 * MIB, zeros), event(1000, "freed_remotely", 256 * MIB, 16 * MIB, upload),
    event(1100, "unmapped", 256 * MIB, 32 * MIB), event(1200, "trimmed", 0, 32 * MIB),
    event(1300, "out_of_memory", 0, 2 ** 40, upload), event(1400, "freed", 69 * MIB, 2 * MIB, upload)],
});

/** Random numbers that are the same in each run (mulberry32). */
const random = seed => below => {
  seed = (seed + 0x6d2b79f5) | 0;
  let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
  return ((mixed ^ (mixed >>> 14)) >>> 0) % below;
};
const any = next => {
  const number = () => [next(64), next(64), next(64), next(64), next(2 ** 31) * 2 ** 33, 2 ** 64][next(6)];
  const some = make => Array.from({ length: next(40) }, make), one = list => list[next(list.length)];
  const who = () => next(2) ? site("abc"[next(3)], next(3)) : null;
  const kinds = ["allocated", "freed", "freed_remotely", "mapped", "unmapped", "out_of_memory", "trimmed"];
  return snapshot({
    chunks: some(() => ({ address: number(), bytes: number() })),
    blocks: some(() => block(number(), number(), one(["live", "free", "pending"]), who())),
    events: some(() => event(number(), one(kinds), number(), number(), who())),
    recorded: next(2) === 1,
  });
};
const RECTANGLE = /<rect (\S+="[^"]*") x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)" data-tip="(.*?)"\/>/g;
const rectangles = (svg, kind) => [...svg.matchAll(RECTANGLE)]
  .filter(([, look]) => look.startsWith(kind)).map(([, look, ...numbers]) => [look, ...numbers.map(Number)]);
const near = (a, b) => assert.ok(Math.abs(a - b) < 0.02, `${a} is not ${b}`);

test("numbers as people read them", () => {
  assert.deepEqual([0, 1023, 1024, 1536].map(bytesText), ["0 B", "1023 B", "1.0 KiB", "1.5 KiB"]);
  assert.deepEqual([MIB - 1, 24 * MIB, 1023 * MIB].map(bytesText), ["1.0 MiB", "24.0 MiB", "1023.0 MiB"]);
  assert.deepEqual([5 * 2 ** 28, 2 ** 64].map(bytesText), ["1.25 GiB", "16.00 EiB"]);
  assert.deepEqual([0, 999, 1000, 12340, 3200000].map(timeText), ["0 us", "999 us", "1.00 ms", "12.34 ms", "3.200 s"]);
});

test("large addresses stay exact", () => {
  const at = (address, kind, site) => `{"micros":0,"kind":"${kind}","address":${address},"bytes":256,"requested":0,`
    + `"stream":0,"site":${JSON.stringify(site)}}`;
  const evil = site(`"address":7`, 1), large = 2n ** 62n;
  const events = [at(0, "trimmed", null), at(large + 512n, "allocated", evil), at(large + 768n, "allocated", null)];
  const [read_] = read(`[{"chunks":[{"address":${large},"bytes":1024}],"blocks":[],"events":[${events}]}]`);
  assert.deepEqual(read_.events.slice(1).map(event => event.address), [512, 768]);
  assert.deepEqual([read_.chunks[0].address, read_.origin, read_.events[1].site], [0, large, evil]);
  const { blocks } = historyOf(read_), { tips } = svgOf(read_, historyOf(read_));
  assert.deepEqual(blocks.map(span), [[512, 256, 1, 4], [768, 256, 2, 4]]);
  assert.ok(tips.some(tip => tip.startsWith("256 B at 0x4000000000000200\n")), tips);
  assert.deepEqual([read("[]"), read(`[{"chunks":[],"blocks":[],"events":[]}]`)[0].origin], [[], 0n]);
});

test("a short life", () => {
  const { blocks, chunks, pending, sites, refusals, end } = historyOf(example);
  assert.equal(end, 9, "eight events and the present");
  assert.deepEqual(chunks.map(span), [[64 * MIB, 8 * MIB, 0, 9], [256 * MIB, 32 * MIB, 0, 4]]);
  assert.deepEqual(blocks.map(b => [...span(b), b.born, b.died, b.remote]), [
    [64 * MIB, MIB, 0, 9, null, null, false],
    [69 * MIB, 2 * MIB, 0, 7, null, 1400, false],
    [256 * MIB, 16 * MIB, 1, 3, 200, 1000, true],
    [65 * MIB, 4 * MIB, 2, 9, 900, null, false],
  ]);
  assert.deepEqual(pending.map(span), [[69 * MIB, 2 * MIB, 7, 9]]);
  assert.deepEqual(refusals, [6]);
  assert.deepEqual(sites.map(s => [s.name, s.peak / MIB, s.bytes / MIB, s.live, s.allocations, s.remote]), [
    [siteText(upload), 18, 0, 0, 1, 1], [siteText(zeros), 4, 4, 1, 1, 0], [siteText(null), 1, 1, 1, 0, 0],
  ]);
  assert.ok(blocks.every(b => sites[b.site].peak >= b.bytes), "blocks are numbered as the rows");
  assert.deepEqual([...levelOf(blocks, end)].map(n => n / MIB), [3, 19, 23, 7, 7, 7, 7, 5, 5]);
  assert.deepEqual([...levelOf(chunks, end)].map(n => n / MIB), [40, 40, 40, 40, 8, 8, 8, 8, 8]);
});

test("chunks go back in pieces", () => {
  const { chunks } = historyOf(snapshot({
    events: [event(0, "mapped", 100, 40), event(0, "mapped", 140, 20), event(0, "unmapped", 110, 10),
      event(0, "unmapped", 130, 30), event(0, "mapped", 130, 10), event(0, "unmapped", 500, 5)],
    chunks: [{ address: 100, bytes: 10 }, { address: 900, bytes: 1 }],
  }));
  assert.deepEqual(chunks.map(span), [[100, 10, 0, 7], [110, 10, 0, 2], [120, 10, 0, 7], [130, 10, 0, 3],
    [130, 10, 4, 7], [140, 20, 1, 3], [500, 5, 0, 5], [900, 1, 0, 7]]);
});

test("without recording the present is all there is", () => {
  const blocks = [block(0, 1024, "live"), block(1024, 1024, "pending"), block(2048, 2048, "free")];
  const present = snapshot({ chunks: [{ address: 0, bytes: 4096 }], blocks, recorded: false });
  const history = historyOf(present), { svg } = svgOf(present, history);
  assert.deepEqual([history.end, history.blocks.map(span)], [1, [[0, 1024, 0, 1]]]);
  assert.deepEqual(history.pending.map(span), [[1024, 1024, 0, 1]]);
  const [[, , , width]] = rectangles(svg, `class="b cn`);
  near(width, WIDTH - 0.6);
  assert.equal(rectangles(svg, `fill="url(#hatch)"`).length, 1);
  assert.ok(svg.includes("for the past, record it"));
  svgOf(snapshot({}), historyOf(snapshot({})));
});

test("a missed free ends with the next owner", () => {
  const taken = (micros, address) => event(micros, "allocated", address, 8, zeros);
  const events = [taken(5, 0), taken(6, 8), taken(7, 0)];
  const { blocks, sites } = historyOf(snapshot({ events }));
  assert.deepEqual(blocks.map(b => [...span(b), b.died]), [[0, 8, 0, 2, null], [8, 8, 1, 4, null], [0, 8, 2, 4, null]]);
  assert.deepEqual([sites[0].peak, sites[0].live], [16, 2]);
});

test("small blocks by size", () => {
  const sized = (size, state) => ({ ...block(0, size, state), class: size });
  const blocks = [sized(4096, "live"), sized(256, "free"), sized(256, "live"), sized(256, "pending")];
  blocks.push(block(0, 9, "live"));
  assert.deepEqual(classesOf(blocks), [["256 B", 1, 1, 1], ["4.0 KiB", 1, 0, 0]]);
});

test("holes between addresses are left out", () => {
  const chunks = [[MIB, MIB], [2 * MIB, MIB], [2 ** 60, 2 * MIB]].map(([address, bytes]) => ({ address, bytes }));
  const { place, runs } = layoutOf(421, chunks, []);
  assert.deepEqual(chunks.map(place), [[316, 105], [211, 105], [0, 205]]);
  assert.deepEqual(place({ address: 2 ** 60 + MIB, bytes: MIB }), [0, 102.5], "the upper half of the upper chunk");
  assert.deepEqual(runs.map(run => run.bytes), [2 * MIB, 2 * MIB]);
  const [small, huge] = [{ address: 0, bytes: 2 * MIB }, { address: 2 ** 40, bytes: 2 ** 37 }];
  const beside = layoutOf(400, [small, huge], []);
  assert.ok(beside.place(small)[1] >= 5 && beside.place(huge)[1] > 380);
});

test("higher addresses are higher up, and what is apart stays apart", () => {
  for (let seed = 0; seed < 300; seed++) {
    const next = random(seed), some = (n, range, from) =>
      Array.from({ length: n }, () => ({ address: next(range), bytes: from + next(20) }));
    const chunks = some(1 + next(19), 100, 1), all = [...chunks, ...some(next(20), 200, 0)];
    const { place } = layoutOf(300, chunks, all.slice(chunks.length));
    for (const a of all.filter(a => a.bytes > 0)) {
      const [top, height] = place(a);
      assert.ok(top >= -1e-9 && height > 0 && top + height <= 300 + 1e-9, `seed ${seed}`);
      for (const b of all.filter(b => b.bytes > 0)) {
        const [other, its] = place(b);
        if (a.address + a.bytes <= b.address) assert.ok(top + 1e-9 >= other + its, `seed ${seed}`);
        if (a.address <= b.address && b.address + b.bytes <= a.address + a.bytes) {
          assert.ok(top <= other + 1e-9 && other + its <= top + height + 1e-9, `seed ${seed}`);
        }
      }
    }
  }
});

test("a block is drawn where and when it was", () => {
  const { svg, tips } = svgOf(example, historyOf(example)), step = WIDTH / 9;
  const [low, high] = rectangles(svg, `class="chunk"`).sort((a, b) => b[2] - a[2]);
  const gone = rectangles(svg, `class="b c0 s0"`).find(([, x]) => x > 0);
  near(gone[1], step), near(gone[3], 2 * step - 0.6), near(gone[4], high[4] / 2 - 0.6);
  near(high[3], 4 * step);
  assert.ok(low[3] >= WIDTH && high[2] < low[2], "higher addresses are higher up");
  assert.equal(tips[gone[5]], "16.0 MiB at 0x10000000, asked for 16.0 MiB\nupload at src/train.rs:10:9\non stream 2\n"
    + "from 200 us to 1.00 ms: 800 us, freed by another thread");
  assert.ok(tips.some(tip => tip.endsWith("\nuntil 1.40 ms, freed")), "what was there before has no birth");
  assert.ok(tips.some(tip => tip.endsWith("\nsince 900 us")));
  assert.equal(svg.split(`class="refused"`).length - 1, 2, "in both plots");
  assert.equal(rectangles(svg, `fill="url(#hatch)"`).length, 1);
  assert.ok(svg.includes("</tspan> (filled) 5.0 MiB now, <tspan class=\"name\">reserved</tspan> (line) 8.0 MiB now"));
});

test("names are in the tips only", () => {
  const evil = "</script><img src=x onerror=\"alert(1)\">", events = [event(0, "allocated", 0, 8, site(evil, 1))];
  const { svg, tips } = svgOf(snapshot({ events }), historyOf(snapshot({ events })));
  assert.ok(!svg.includes("img") && tips.some(tip => tip.includes(evil)));
});

test("curves keep their peaks", () => {
  const events = Array.from({ length: 100000 }, (_, i) => event(i, "trimmed", 0, 0));
  events[77777] = event(77777, "allocated", 0, 50), events[77778] = event(77778, "freed", 0, 50);
  const { svg } = svgOf(snapshot({ events }), historyOf(snapshot({ events })));
  const [, path] = svg.match(/class="live" d="(.*?)"/);
  assert.ok(path.startsWith("M0 116.00H") && path.includes("V6.00H") && path.endsWith("V116.00H1104V116H0Z"), path);
});

test("many refusals do not hide the rest", () => {
  const lines = count => {
    const events = Array.from({ length: count }, (_, i) => event(i, "out_of_memory", 0, 1));
    const { svg } = svgOf(snapshot({ events }), historyOf(snapshot({ events })));
    return [svg.split(`class="refused"`).length - 1, svg.split(` 0V${HEIGHT}" data-tip`).length - 1];
  };
  assert.deepEqual([lines(12), lines(13)], [[24, 12], [26, 0]]);
  assert.ok(lines(50000)[0] <= 2 * (WIDTH + 1));
});

test("a long past is bounded", () => {
  const events = [];
  for (let i = 0; i < 30000; i++) {
    const at = i % 100, bytes = 256 + 16 * at;
    events.push(event(2 * i, "allocated", at * 4096, bytes), event(2 * i + 1, "freed", at * 4096, bytes));
  }
  const long = snapshot({ events, chunks: [{ address: 0, bytes: MIB }] }), { svg, left } = svgOf(long, historyOf(long));
  assert.deepEqual([left, rectangles(svg, `class="b `).length], [10000, 20000]);
  assert.ok(svg.length < 6 * MIB, `${svg.length}`);
  // What is looked at closely is drawn.
  assert.equal(svgOf(long, historyOf(long), 1000, 2000).left, 0);
});

test("call sites beyond nine share a colour", () => {
  assert.equal(colourOf({ name: siteText(null), place: 0 }), "cn");
  assert.deepEqual([0, 8, 9, 500].map(place => colourOf({ name: "a", place })), ["c0", "c8", "c9", "c9"]);
  assert.equal(new Set(COLOURS).size, 10);
});

test("any snapshot has a picture that stays in its plot", () => {
  for (let seed = 0; seed < 500; seed++) {
    const chosen = any(random(seed)), history = historyOf(chosen), { blocks, chunks, sites, end } = history;
    for (const { since, until } of [...blocks, ...chunks]) assert.ok(0 <= since && since <= until && until <= end);
    chunks.forEach((a, i) => chunks.slice(i + 1).forEach(b => assert.ok(chosen.chunks.length > 0 || a.since === 0
      || b.since === 0 || a.address + a.bytes <= b.address || b.address + b.bytes <= a.address
      || a.until <= b.since || b.until <= a.since, `seed ${seed}: overlap`)));
    assert.ok(blocks.every(b => b.site < sites.length));
    const counted = levelOf(blocks.map(b => ({ ...b, bytes: 1 })), end);
    counted.forEach((n, at) => assert.equal(n, blocks.filter(b => b.since <= at && at < b.until).length));
    const { svg } = svgOf(chosen, history);
    assert.ok(!/NaN|undefined|Infinity/.test(svg), `seed ${seed}`);
    for (const [, x, y, width, height] of [...rectangles(svg, `class="b `), ...rectangles(svg, `class="chunk"`)]) {
      assert.ok(x >= 0 && y >= -0.01 && x + width <= WIDTH + 0.32 && y + height <= HEIGHT + 0.32, `seed ${seed}`);
    }
  }
});
