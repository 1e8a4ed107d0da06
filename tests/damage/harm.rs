//! Damage, drawn from a seed: of bytes, and of the JSON of something.

use serde_json::{Map, Value};

/// Random numbers of a seed.
pub(super) struct Draw(u64);

impl Draw {
    /// The generator of a case of a kind.
    pub(super) fn new(kind: &str, case: u64) -> Self {
        let seed =
            kind.bytes().fold(case, |seed, byte| seed.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte));
        let mut draw = Self(seed);
        draw.word();
        draw
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    pub(super) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// A number that is likely to break readers.
    pub(super) fn extreme(&mut self) -> u64 {
        let near = self.word() % 3;
        let drawn = self.word();
        *self.pick(&[
            0,
            1,
            7,
            1 << 31,
            1 << 32,
            1 << 40,
            1 << 62,
            1 << 63,
            u64::MAX - near,
            drawn,
            drawn >> 48,
        ])
    }

    /// A part of `length`, usually short.
    fn range(&mut self, length: usize) -> (usize, usize) {
        let from = self.below(length + 1);
        let most = if self.one_in(4) { length - from } else { 16.min(length - from) };
        (from, from + self.below(most + 1))
    }
}

/// Returns the bytes after one to three accidents; `other` is valid and of the same kind.
pub(super) fn harm(draw: &mut Draw, bytes: &[u8], other: &[u8]) -> Vec<u8> {
    let mut harmed = bytes.to_vec();
    for _ in 0..if draw.one_in(3) { 1 + draw.below(3) } else { 1 } {
        match draw.below(3) {
            0 => flip(draw, &mut harmed),
            1 => overwrite(draw, &mut harmed),
            _ => cut_and_join(draw, &mut harmed, other),
        }
    }
    harmed
}

fn flip(draw: &mut Draw, bytes: &mut [u8]) {
    for _ in 0..1 + draw.below(3) {
        if !bytes.is_empty() {
            let at = draw.below(bytes.len());
            bytes[at] ^= 1 << draw.below(8);
        }
    }
}

/// Accidents that preserve the length.
pub(super) fn overwrite(draw: &mut Draw, bytes: &mut [u8]) {
    let (from, to) = draw.range(bytes.len());
    match draw.below(4) {
        0 => flip(draw, bytes),
        1 => bytes[from..to].fill(*draw.pick(&[0, 0xff, b'0', b' '])),
        2 => bytes[from..to].iter_mut().for_each(|byte| *byte = draw.word() as u8),
        _ => {
            let words = bytes.len() / 8;
            if words > 0 {
                let at = 8 * draw.below(words);
                bytes[at..at + 8].copy_from_slice(&draw.extreme().to_le_bytes());
            }
        }
    }
}

fn cut_and_join(draw: &mut Draw, bytes: &mut Vec<u8>, other: &[u8]) {
    let (from, to) = draw.range(bytes.len());
    let at = draw.below(bytes.len() + 1);
    match draw.below(7) {
        0 => bytes.truncate(at),
        1 => bytes.extend(std::iter::repeat_n(*draw.pick(&[0, b' ', 0xff]), 1 + at % 5000)),
        2 => drop(bytes.drain(from..to)),
        3 => {
            let part = bytes[from..to].to_vec();
            drop(bytes.splice(at..at, part));
        }
        4 => {
            let (from, size) = (from.min(at), (to - from).min(from.abs_diff(at)));
            let last = from.max(at).min(bytes.len() - size);
            let (head, tail) = bytes.split_at_mut(last);
            if from + size <= last {
                head[from..from + size].swap_with_slice(&mut tail[..size]);
            }
        }
        5 => {
            bytes.truncate(at);
            bytes.extend(other.iter().skip(at));
        }
        _ => {
            bytes.truncate(at);
            bytes.extend(&other[draw.below(other.len() + 1)..]);
        }
    }
}

/// Placeholder for text that is no JSON, or unusual JSON.
const RAW: &str = "\u{1}raw\u{1}";
/// Numbers and texts that few readers expect.
const RAWS: [&str; 16] = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "-0",
    "-1",
    "00",
    "0.5",
    "1.0",
    "1e3",
    "18446744073709551616",
    "9223372036854775808",
    "123456789012345678901234567890",
    r#""\ud800""#,
    "\"\u{0}\"",
];

/// A JSON text in which one node is another, occurs twice, or is missing.
pub(super) fn harm_json(draw: &mut Draw, text: &str) -> Vec<u8> {
    let mut value: Value = serde_json::from_str(text).expect("it is valid as yet");
    let mut raw = Vec::new();
    let mut paths = Vec::new();
    walk(&value, "", &mut paths);
    let path = draw.pick(&paths).clone();
    let other = value.pointer(draw.pick(&paths).as_str()).cloned().unwrap_or_default();
    if draw.one_in(3) && edit_parent(draw, &mut value, &path, &other) {
        return value.to_string().into_bytes();
    }
    let node = value.pointer_mut(&path).expect("it was walked to");
    *node = match draw.below(8) {
        0 => other,
        1 => reshaped(node.clone(), text),
        2 => Value::from(draw.extreme()),
        3 => draw
            .pick(&[Value::Null, true.into(), "".into(), "7".into(), Value::Array(vec![]), Map::new().into()])
            .clone(),
        4 => Value::from(draw.pick(&["x", "ü", "/", "\u{0}"]).repeat(1 + draw.below(20_000))),
        5 => {
            raw = draw.pick(&RAWS).as_bytes().to_vec();
            RAW.into()
        }
        6 => {
            let depth = 1 + draw.below(100_000);
            let (open, close) = *draw.pick(&[("[", "]"), ("{\"a\":", "}"), ("[", "")]);
            raw = format!("{}7{}", open.repeat(depth), close.repeat(depth)).into_bytes();
            RAW.into()
        }
        _ => {
            raw = vec![b'"', draw.word() as u8 | 0x80, b'"'];
            if let Some(fields) = node.as_object().filter(|fields| !fields.is_empty()) {
                raw = twice(draw, fields);
            }
            RAW.into()
        }
    };
    filled(&value, &raw)
}

/// Paths of all nodes, as of [`Value::pointer`].
fn walk(value: &Value, path: &str, found: &mut Vec<String>) {
    found.push(path.to_owned());
    for (key, inner) in value.as_object().into_iter().flatten() {
        walk(inner, &format!("{path}/{}", key.replace('~', "~0").replace('/', "~1")), found);
    }
    for (index, inner) in value.as_array().into_iter().flatten().enumerate() {
        walk(inner, &format!("{path}/{index}"), found);
    }
}

/// Removes the node from its parent, adds something to the parent, or renames the node; returns whether it could.
fn edit_parent(draw: &mut Draw, value: &mut Value, path: &str, other: &Value) -> bool {
    let Some((parent, key)) = path.rsplit_once('/') else { return false };
    let key = key.replace("~1", "/").replace("~0", "~");
    match value.pointer_mut(parent) {
        Some(Value::Object(fields)) => match draw.below(3) {
            0 => drop(fields.remove(&key)),
            1 => drop(fields.insert(draw.pick(&["extra", "", "Name"]).to_string(), other.clone())),
            _ => {
                let node = fields.remove(&key).unwrap_or_default();
                fields.insert(draw.pick(&["digest", "name", "step", "x"]).to_string(), node);
            }
        },
        Some(Value::Array(items)) => match (draw.below(3), key.parse::<usize>()) {
            (0, Ok(index)) => drop(items.remove(index)),
            (1, _) => items.push(other.clone()),
            (_, Ok(index)) => items.swap(index, 0),
            _ => return false,
        },
        _ => return false,
    }
    true
}

/// A list for an object, in the order of its text; an object for a list, and either for anything else.
fn reshaped(node: Value, text: &str) -> Value {
    match node {
        Value::Object(fields) => {
            let mut rows: Vec<_> = fields.into_iter().collect();
            rows.sort_by_key(|(key, _)| text.find(&format!("{}:", Value::from(key.as_str()))));
            rows.into_iter().map(|(_, value)| value).collect()
        }
        Value::Array(items) => Value::Object(
            items.into_iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect(),
        ),
        Value::String(text) => Value::Object([(text, Value::Null)].into_iter().collect()),
        other => vec![other].into(),
    }
}

/// An object with one of its keys twice, usually with different values.
fn twice(draw: &mut Draw, fields: &Map<String, Value>) -> Vec<u8> {
    let again = draw.below(fields.len());
    let mut rows: Vec<String> =
        fields.iter().map(|(key, value)| format!("{}:{value}", Value::from(key.clone()))).collect();
    let (key, value) = fields.iter().nth(again).expect("it is below their number");
    let value = draw.pick(&[value.clone(), Value::Null, 0.into(), "other".into()]).clone();
    rows.insert(draw.below(rows.len() + 1), format!("{}:{value}", Value::from(key.clone())));
    format!("{{{}}}", rows.join(",")).into_bytes()
}

/// The text of a value, with raw bytes at one position.
fn filled(value: &Value, raw: &[u8]) -> Vec<u8> {
    let (text, mark) = (value.to_string(), Value::from(RAW).to_string());
    match text.split_once(&mark) {
        Some((before, after)) => [before.as_bytes(), raw, after.as_bytes()].concat(),
        None => text.into_bytes(),
    }
}

/// Whether two values are the same to readers, for whom 7 and 7.0 are one number.
pub(super) fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one == other || one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|found| same(value, found)))
        }
        _ => one == other,
    }
}
