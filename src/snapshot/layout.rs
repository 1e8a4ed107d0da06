//! Layout of an arena file, and the descriptor that records it. Pure.
//!
//! ```text
//! 0     magic, format, descriptor bytes, payload bytes, file bytes, checksum of these and the descriptor   (u64 each)
//! 64    state of buffer 0: version, state, seal               128   state of buffer 1
//! 192   descriptor: meta, then name and size of each unit     then both buffers, each at a page:
//!       version and digests, 8 bytes each, then the units
//! ```

use crate::ensure;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: u64 = u64::from_le_bytes(*b"EVMARENA");
const FORMAT: u64 = 3;
const PAGE: usize = 4096;
const LINE: usize = 64;
/// Maximum bytes of a descriptor: room for 400,000 units.
const MAX_DESCRIPTOR: usize = 64 << 20;
/// Bytes before the descriptor.
pub(super) const HEADER: usize = 192;
/// Offset of the state of buffer 0; that of buffer 1 follows one cache line later.
pub(super) const STATES: usize = LINE;

/// A named range of bytes in each buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Unique name.
    pub name: String,
    /// Offset in the buffer, a multiple of 64.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Immutable properties of an arena.
///
/// ```
/// use evermoe::snapshot::Layout;
/// // The version and two digests take 24 bytes: the first unit starts at 64, the second at a multiple of 64.
/// let layout = Layout::new("{}", &[("a".into(), 65), ("b".into(), 1)])?;
/// assert_eq!((layout.units()[0].offset, layout.units()[1].offset), (64, 192));
/// assert_eq!(layout.payload_bytes(), 256);
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    meta: String,
    units: Vec<Unit>,
    descriptor: Vec<u8>,
    payload_bytes: usize,
    buffers_at: usize,
    file_bytes: usize,
}

impl Layout {
    /// Lays out `units` (name, bytes) in their order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a name occurs twice, the names are too long or the sizes overflow.
    pub fn new(meta: &str, units: &[(String, usize)]) -> Result<Self> {
        let mut names = BTreeSet::new();
        let twice = units.iter().find(|(name, _)| !names.insert(name));
        ensure!(
            twice.is_none(),
            "units: {:?} occurs twice; names must be unique",
            twice.map_or("", |(name, _)| name)
        );
        let descriptor = describe(meta, units);
        ensure!(
            descriptor.len() <= MAX_DESCRIPTOR,
            "units: their names take {} bytes, at most {MAX_DESCRIPTOR} fit",
            descriptor.len()
        );
        Self::compute(meta, units, descriptor)
            .ok_or_else(|| Error::invalid("units: the sizes overflow the address space"))
    }

    fn compute(meta: &str, units: &[(String, usize)], descriptor: Vec<u8>) -> Option<Self> {
        let mut end = align(units.len().checked_add(1)?.checked_mul(8)?, LINE)?;
        let mut placed = Vec::with_capacity(units.len());
        for (name, bytes) in units {
            placed.push(Unit { name: name.clone(), offset: end, bytes: *bytes });
            end = align(end.checked_add(*bytes)?, LINE)?;
        }
        let buffers_at = buffers_at(descriptor.len())?;
        let file_bytes = file_bytes_of(buffers_at, end)?;
        let fits = file_bytes <= isize::MAX as usize;
        let meta = meta.to_owned();
        fits.then_some(Self { meta, units: placed, descriptor, payload_bytes: end, buffers_at, file_bytes })
    }

    /// The caller's description of the arena.
    pub fn meta(&self) -> &str {
        &self.meta
    }

    /// The units in their order.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Bytes of one buffer: version, digests and units.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.file_bytes
    }

    /// Offset of a buffer in the file.
    pub(super) fn buffer_at(&self, index: usize) -> usize {
        self.buffers_at + index * (self.file_bytes - self.buffers_at) / 2
    }

    /// The header and the descriptor, both states zero: empty.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        let sizes = [self.descriptor.len(), self.payload_bytes, self.file_bytes].map(|size| size as u64);
        for (field, value) in [MAGIC, FORMAT].into_iter().chain(sizes).enumerate() {
            bytes[field * 8..field * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        let checksum = checksum(&bytes, &self.descriptor);
        bytes[40..48].copy_from_slice(&checksum.to_le_bytes());
        bytes.extend_from_slice(&self.descriptor);
        bytes
    }

    /// Reads the output of [`encode`](Self::encode) from the start of a file of `file_bytes`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the defect.
    pub(super) fn decode(bytes: &[u8], file_bytes: usize) -> Result<Self> {
        let wrong = |what: String| Error::corrupt(format!("not a complete arena: {what}"));
        let field = |index| field(bytes, index);
        if bytes.len() < HEADER {
            return Err(wrong(format!("expected at least {HEADER} bytes, got {}", bytes.len())));
        }
        if field(0) != MAGIC {
            return Err(wrong("the first 8 bytes are not EVMARENA".into()));
        }
        if field(1) != FORMAT {
            return Err(wrong(format!(
                "expected format {FORMAT}, got {}; remove the file and make a new one",
                field(1)
            )));
        }
        if field(4) != file_bytes as u64 {
            return Err(wrong(format!("expected {} bytes, the file has {file_bytes}", field(4))));
        }
        let descriptor = usize::try_from(field(2)).ok().and_then(|size| bytes[HEADER..].get(..size));
        let Some(descriptor) = descriptor.filter(|descriptor| checksum(bytes, descriptor) == field(5)) else {
            return Err(wrong("its header does not match its checksum".into()));
        };
        let (meta, units) =
            parse(descriptor).ok_or_else(|| wrong("the list of units cannot be read".into()))?;
        let layout = Self::new(&meta, &units).map_err(|error| wrong(error.to_string()))?;
        if (layout.payload_bytes as u64, layout.file_bytes) != (field(3), file_bytes) {
            return Err(wrong("the sizes of the units do not fill the file".into()));
        }
        Ok(layout)
    }
}

/// Number `index` of the header; 0 past the end.
fn field(header: &[u8], index: usize) -> u64 {
    header.get(index * 8..).and_then(|bytes| Reader(bytes).number()).unwrap_or_default()
}

/// Size of the descriptor that a header announces; 0 if the announced sizes do not fill a file of `file_bytes`.
pub(super) fn descriptor_bytes(header: &[u8], file_bytes: usize) -> usize {
    let size = |index| usize::try_from(field(header, index)).ok();
    let filled = |descriptor: usize, payload| file_bytes_of(buffers_at(descriptor)?, payload);
    let descriptor =
        size(2).zip(size(3)).filter(|&(each, payload)| filled(each, payload) == Some(file_bytes));
    descriptor.map_or(0, |(descriptor, _)| descriptor)
}

/// Offset of the buffers after a descriptor of this size.
fn buffers_at(descriptor: usize) -> Option<usize> {
    align(HEADER.checked_add(descriptor)?, PAGE)
}

/// Size of a file with two buffers of `payload` bytes at `buffers_at`.
fn file_bytes_of(buffers_at: usize, payload: usize) -> Option<usize> {
    align(payload, PAGE)?.checked_mul(2)?.checked_add(buffers_at)
}

fn align(bytes: usize, to: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(to)
}

/// Digest of the first five numbers of the header, and of the descriptor.
fn checksum(header: &[u8], descriptor: &[u8]) -> u64 {
    xxh3_64(&[&header[..40], &xxh3_64(descriptor).to_le_bytes()].concat())
}

fn describe(meta: &str, units: &[(String, usize)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    };
    text(&mut bytes, meta);
    for (name, size) in units {
        text(&mut bytes, name);
        bytes.extend_from_slice(&(*size as u64).to_le_bytes());
    }
    bytes
}

fn parse(descriptor: &[u8]) -> Option<(String, Vec<(String, usize)>)> {
    let mut reader = Reader(descriptor);
    let meta = reader.text()?;
    let mut units = Vec::new();
    while !reader.0.is_empty() {
        units.push((reader.text()?, usize::try_from(reader.number()?).ok()?));
    }
    Some((meta, units))
}

/// Reads numbers and texts from the front of some bytes.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn text(&mut self) -> Option<String> {
        let size = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.0.split_at_checked(size)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        Layout::new("{\"step\": \"ü\"}", &[("dense".into(), 100), ("empty".into(), 0), ("ex/0".into(), 64)])
            .unwrap()
    }

    #[test]
    fn decodes_what_it_encodes() {
        let layout = layout();
        assert_eq!(Layout::decode(&layout.encode(), layout.file_bytes()).unwrap(), layout);
    }

    #[test]
    fn every_flipped_bit_of_the_header_is_found() {
        let layout = layout();
        let bytes = layout.encode();
        for at in (0..48).chain(HEADER..bytes.len()) {
            for bit in 0..8 {
                let mut bytes = bytes.clone();
                bytes[at] ^= 1 << bit;
                let result = Layout::decode(&bytes, layout.file_bytes());
                assert!(matches!(result, Err(Error::Corrupt { .. })), "byte {at}, bit {bit}: {result:?}");
            }
        }
    }

    #[test]
    fn every_cut_is_found() {
        let (layout, bytes) = (layout(), layout().encode());
        for size in 0..bytes.len() {
            assert!(Layout::decode(&bytes[..size], layout.file_bytes()).is_err(), "cut at {size}");
        }
        assert!(Layout::decode(&bytes, layout.file_bytes() - 1).is_err());
    }

    #[test]
    fn names_must_be_unique_and_sizes_sane() {
        let message = |units: &[(String, usize)]| Layout::new("", units).unwrap_err().to_string();
        assert!(message(&[("a".into(), 1), ("a".into(), 2)]).contains("\"a\""));
        assert!(message(&[("a".into(), usize::MAX)]).contains("overflow"));
        assert!(message(&[("a".into(), usize::MAX / 4), ("b".into(), usize::MAX / 4)]).contains("overflow"));
    }
}
