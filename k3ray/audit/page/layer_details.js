// One layer in words and figures, and where it stands among the others by bytes.

const ATTENTION_MEANS = {
  KDA: "Kimi Delta Attention: a recurrence with one matrix of state a head. Its memory does not grow with the text; it also keeps the last inputs of three short convolutions.",
  MLA: "Multi-head latent attention: every position leaves one latent vector, read by all heads. Its memory grows with the text. No rotation is applied to any channel.",
};
const FEED_FORWARD_MEANS = {
  dense: "One MLP for every token, without routing.",
  MoE: "A router picks a few routed experts for each token; the shared experts run for all of them.",
};

function fact(term, ...content) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, content));
}

// What the first layer of a block does; bankSize counts the vector that it adds.
function opening(bankSize) {
  const before = bankSize === 1
    ? "Opens the first block: attention reads the embedding itself, which becomes the first finished vector."
    : `Opens the block: attention reads ${plural(bankSize - 1, "finished vector")} mixed with the running sum, which then becomes another.`;
  return `${before} A new sum begins, and the feed-forward mixes it with ${bankSize === 1 ? "that vector" : `all ${count(bankSize)}`}.`;
}

function layerDetails(layers, index, blocks) {
  const row = layers[index];
  const bankSize = blocks.findIndex(([block]) => block === row.attnres_block) + 1;
  const first = blocks[bankSize - 1][1][0] === row;
  const total = layers.every((other) => known(other.bytes)) ? layers.reduce((sum, other) => sum + other.bytes, 0) : null;
  return [
    element(
      "header",
      {},
      element("h3", {}, `Layer ${row.layer}`),
      element("p", { class: "standing" }, badge(row.letter), owner(OURS)),
    ),
    element(
      "dl",
      { class: "facts" },
      fact("attention", element("b", {}, row.attention), element("p", {}, ATTENTION_MEANS[row.attention])),
      fact("feed-forward", element("b", {}, row.feed_forward), element("p", {}, FEED_FORWARD_MEANS[row.feed_forward])),
      fact(
        "AttnRes block",
        element("b", {}, row.attnres_block),
        element("p", {}, first ? opening(bankSize) : `Mixes ${plural(bankSize, "finished vector")} with the block\u2019s running sum, before attention and before the feed-forward, and adds both results to that sum.`),
      ),
      fact("tensors", element("b", {}, count(row.tensors))),
      fact("bytes", bothBytes(row.bytes), total ? element("p", {}, `${percent(row.bytes / total)} of all layers`) : null),
      fact(row.shards.length === 1 ? "shard" : "shards", row.shards.length ? row.shards.map((name) => element("code", {}, name)) : NOT_KNOWN),
      fact("in config.json", `layer ${row.layer + 1}`, element("p", {}, "Its lists of layers count from one.")),
    ),
    total ? layerBytesPlot(layers, index) : null,
  ].filter(Boolean);
}

function layerBytesPlot(layers, chosen) {
  const most = Math.max(...layers.map((row) => row.bytes));
  const step = 300 / layers.length;
  const bars = layers.map((row, index) => {
    const height = most ? (row.bytes / most) * 56 : 0;
    return drawing("rect", {
      x: (index * step).toFixed(2),
      y: (60 - height).toFixed(2),
      width: Math.max(0.6, step - 0.7).toFixed(2),
      height: height.toFixed(2),
      class: `bar ${row.attention}${index === chosen ? " chosen" : ""}`,
    });
  });
  return element(
    "figure",
    { class: "layer-bytes" },
    drawing("svg", { viewBox: "0 0 300 61", role: "img", "aria-label": "Bytes of every layer, the chosen one marked" }, bars, drawing("path", { d: "M0 60.5H300", class: "axis" })),
    element("figcaption", {}, `Bytes of every layer; the tallest is ${decimalBytes(most)}.`),
  );
}
