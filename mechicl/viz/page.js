// Draws the figures of a page of page.py as they are scrolled to.
//
// plotly's source and the figures stand in the page as compressed text, so that words and tables are there at once.
// After the first paint both are unpacked, one time. `mechicl.ready` is a promise of that, `mechicl.drawAll()` one of
// every figure drawn; a figure that is drawn has data-drawn="yes".
globalThis.mechicl = (() => {
  const DIGITS = "DIGITS_OF_BASE_85"; // page.py writes them here
  const NEAR = "500px"; // above and below the window: figures there are drawn ahead
  const OPTIONS = { displaylogo: false, responsive: true };
  const places = [...document.querySelectorAll(".figure")];
  let pack; // { figures, templates }, once unpacked

  /** The bytes that a script element's text stands for: five digits of base 85 are four bytes. */
  function bytesOf(id) {
    const text = document.getElementById(id).textContent;
    const worth = new Uint8Array(128);
    for (let i = 0; i < 85; i++) worth[DIGITS.charCodeAt(i)] = i;
    const groups = Math.ceil(text.length / 5);
    const bytes = new DataView(new ArrayBuffer(4 * groups));
    for (let group = 0; group < groups; group++) {
      let value = 0;
      for (let i = 5 * group; i < 5 * group + 5; i++) {
        value = 85 * value + (i < text.length ? worth[text.charCodeAt(i)] : 84); // a short end counts as the last digit
      }
      bytes.setUint32(4 * group, value);
    }
    return new Uint8Array(bytes.buffer, 0, 4 * groups - (5 * groups - text.length));
  }

  async function unpacked(id) {
    const stream = new Blob([bytesOf(id)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  async function unpack() {
    const [source, figures] = await Promise.all([unpacked("plotly"), unpacked("figures")]);
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    pack = JSON.parse(figures);
  }

  async function draw(place) {
    if (place.dataset.drawn) return;
    place.dataset.drawn = "begun";
    const { data, layout, template } = pack.figures[place.dataset.figure];
    await Plotly.newPlot(place, data, { ...layout, template: pack.templates[template] }, OPTIONS);
    place.dataset.drawn = "yes";
    performance.mark("figure drawn");
  }

  async function drawAll() {
    await ready;
    await Promise.all(places.map(draw));
    while (places.some((place) => place.dataset.drawn !== "yes")) await new Promise((done) => setTimeout(done, 20));
  }

  function say(words) {
    for (const place of places.filter((place) => !place.dataset.drawn)) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = words;
      place.replaceChildren(note);
    }
  }

  function watch() {
    const observer = new IntersectionObserver(
      (entries) => {
        for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
          observer.unobserve(target);
          draw(target);
        }
      },
      { rootMargin: `${NEAR} 0px` },
    );
    places.forEach((place) => observer.observe(place));
    addEventListener("beforeprint", () => places.forEach(draw));
  }

  async function start() {
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); // the words are painted
    if (!places.length) return;
    if (!globalThis.DecompressionStream) {
      throw new Error("it cannot unpack them; Chrome or Edge 80, Firefox 113, Safari 16.4 and later can");
    }
    await unpack();
    watch();
  }

  const ready = start();
  ready.catch((error) => say(`This browser does not show the figures: ${error.message}.`));
  return { ready, drawAll };
})();
