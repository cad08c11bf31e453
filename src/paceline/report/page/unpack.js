// Decompression of the columns of numbers.

/** Inflate `packed` and return its columns, each an Int32Array, by name. */
export async function unpack(packed) {
  const planes = await inflate(packed.deflated);
  const columns = {};
  let offset = 0;
  for (const [name, length] of packed.columns) {
    columns[name] = joined(planes.subarray(offset, offset + 4 * length), length);
    offset += 4 * length;
  }
  return columns;
}

/** Replace differences by their sums, in place. */
export function summed(column) {
  for (let i = 1; i < column.length; i += 1) column[i] += column[i - 1];
  return column;
}

async function inflate(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Join the four bytes of each number from their planes. */
function joined(planes, length) {
  const column = new Int32Array(length);
  for (let i = 0; i < length; i += 1) {
    column[i] = planes[i] | (planes[length + i] << 8) | (planes[2 * length + i] << 16) | (planes[3 * length + i] << 24);
  }
  return column;
}
