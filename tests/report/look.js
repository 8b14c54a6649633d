// What a reader of the page would see, as one object. An expression, for scripts/browse.py --evaluate.
(() => {
  const parse = (color) => {
    const [red, green, blue, alpha = 1] = color.match(/[\d.]+/g).map(Number);
    return { rgb: [red, green, blue], alpha };
  };
  const over = (front, back) => front.rgb.map((part, index) => part * front.alpha + back[index] * (1 - front.alpha));
  // Relative luminance and contrast: WCAG 2.2, section 1.4.3 and its definitions.
  const luminance = (rgb) => {
    const [red, green, blue] = rgb.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const paper = (element) => {
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(parse(getComputedStyle(at).backgroundColor));
    return behind.reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const ground = (text) => { // the areas of a picture that a word stands on, over the page
    text.scrollIntoView({ block: "center" });
    const box = text.getBoundingClientRect();
    const found = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    const styles = found.filter((element) => element.tagName === "rect").map(getComputedStyle);
    const areas = styles.filter((style) => style.fill !== "none");
    const layer = (style) => ({ ...parse(style.fill), alpha: style.fillOpacity * style.opacity });
    return areas.reduceRight((back, style) => over(layer(style), back), paper(text));
  };
  const read = (element) => {
    const isPicture = element instanceof SVGElement, style = getComputedStyle(element);
    const back = isPicture ? ground(element) : paper(element);
    return contrast(over(parse(isPicture ? style.fill : style.color), back), back);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const shown = [...document.body.querySelectorAll("*")].filter(
    (element) => !["STYLE", "title"].includes(element.tagName) && hasText(element),
  );
  const ranked = shown.map((element) => [read(element), element.textContent.trim().slice(0, 40)]);
  const pictures = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect());
  const heads = [...document.querySelectorAll("th")];
  return {
    title: document.title,
    text: document.body.innerText,
    headings: [...document.querySelectorAll("h2")].map((heading) => heading.innerText),
    numScripts: document.scripts.length,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    pictures: pictures.map((box) => [box.width, box.height, box.right]),
    brokenHeads: heads.filter((head) => head.offsetHeight > 40).map((head) => head.textContent),
    faintest: ranked.reduce((least, one) => (one[0] < least[0] ? one : least)),
    isDark: luminance(paper(document.body)) < 0.2,
  };
})()
