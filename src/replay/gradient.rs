//! Lossless encoding of gradients in the fewest bytes.
//!
//! A gradient is divided into blocks of 1024 elements. A block is zeros, or exactly representable in bfloat16 (the low
//! halves of all its words are zero), or neither. If all blocks are of one kind, only that kind is recorded; otherwise
//! a table of two bits per block comes first:
//!
//! ```text
//! Zero                       nothing
//! F32, Bf16                  the elements, little-endian
//! Blocks                     tags: block b in bits 2·(b mod 4) of byte b / 4; then the blocks that are not zeros
//! ```
//!
//! Example: 3072 elements, of which the first 1024 are zeros, the next are in bfloat16 and the last are not: tags
//! `0b10_01_00` = 36, then 2048 bytes, then 4096 bytes: 6145 instead of 12288.
//!
//! The gradient is read once if its blocks are of one kind. If they are mixed, those that are not `F32` are read a
//! second time, as their positions are known only then.

use super::bytes::bytes_of;
use super::checksum::{self, GRAIN, PIECE_BYTES};
use crate::cpu::{Disjoint, Gradient, Parallel};
use half::bf16;
use xxhash_rust::xxh3::xxh3_64;

/// Elements of a block.
pub const BLOCK: usize = 1024;
/// Number of bfloat16 blocks that make a piece of the checksum.
const PAIR: usize = 2;
/// Elements that are examined together; the rest of a block is not read once one of them is not bfloat16.
const LANES: usize = 64;

const ZERO: u8 = 0;
const BF16: u8 = 1;
const F32: u8 = 2;

/// Encoding of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// All zeros: no bytes.
    Zero,
    /// float32
    F32,
    /// bfloat16, exactly representable.
    Bf16,
    /// Each block as zeros, bfloat16 or float32, after a table of their kinds.
    Blocks,
}

impl Encoding {
    /// Returns the encoding with this number in headers.
    pub fn numbered(number: u8) -> Option<Self> {
        [Self::Zero, Self::F32, Self::Bf16, Self::Blocks].into_iter().find(|each| *each as u8 == number)
    }
}

/// Result of [`encode_gradient`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// The encoding.
    pub encoding: Encoding,
    /// Bytes that were written.
    pub payload_bytes: usize,
    /// Their digest, for [`super::Header::seal`].
    pub digest: u64,
}

/// Maximum payload size of a gradient of `len` elements, in either dtype.
pub fn most_payload_bytes(len: usize) -> usize {
    4 * len
}

/// Maximum payload size of this gradient.
pub(super) fn room_for(gradient: Gradient<'_>) -> usize {
    match gradient {
        Gradient::Zero => 0,
        Gradient::F32(values) => size_of_val(values),
        Gradient::Bf16(values) => size_of_val(values),
    }
}

/// Size of the table of [`Encoding::Blocks`].
fn tag_bytes(len: usize) -> usize {
    len.div_ceil(BLOCK).div_ceil(4)
}

/// Writes the `len` elements of a gradient to the start of `payload` in the fewest bytes. A table that would save less
/// than a sixteenth is not used. With `any_zero`, the sign of zeros is not kept in blocks of zeros.
///
/// # Panics
/// If the gradient does not have `len` elements, or `payload` is smaller than the gradient in its dtype.
pub fn encode_gradient(
    gradient: Gradient<'_>,
    len: usize,
    any_zero: bool,
    payload: &mut [u8],
    pool: &dyn Parallel,
) -> Encoded {
    assert!(payload.len() >= room_for(gradient), "room for the gradient");
    let (tags, hashes) = match gradient {
        Gradient::Zero => (Vec::new(), Vec::new()),
        Gradient::F32(values) => {
            assert_eq!(values.len(), len);
            narrow(values, any_zero, payload, pool, narrow_block_here())
        }
        Gradient::Bf16(values) => {
            assert_eq!(values.len(), len);
            narrow(values, any_zero, payload, pool, copy_block)
        }
    };
    let encoding = choose(&tags, len);
    let (payload_bytes, digest) = match (encoding, gradient) {
        (Encoding::Zero, _) | (_, Gradient::Zero) => (0, checksum::of_hashes(&[])),
        (Encoding::Bf16, _) => (2 * len, checksum::of_hashes(&hashes)),
        (Encoding::F32, Gradient::F32(values)) => {
            (4 * len, checksum::copy(bytes_of(values), &mut payload[..4 * len], pool))
        }
        (_, gradient) => {
            let payload_bytes = write_blocks(gradient, len, &tags, payload, pool);
            (payload_bytes, checksum::digest(&payload[..payload_bytes], pool))
        }
    };
    Encoded { encoding, payload_bytes, digest }
}

/// The encoding with the fewest bytes, except for a table that would save less than a sixteenth.
fn choose(tags: &[u8], len: usize) -> Encoding {
    let most = tags.iter().copied().max().unwrap_or(ZERO);
    let (uniform, encoding) = match most {
        ZERO => return Encoding::Zero,
        BF16 => (2 * len, Encoding::Bf16),
        _ => (4 * len, Encoding::F32),
    };
    let blocks: usize = tag_bytes(len) + (0..tags.len()).map(|b| block_bytes(tags[b], b, len)).sum::<usize>();
    if blocks <= uniform - uniform / 16 { Encoding::Blocks } else { encoding }
}

fn block_len(block: usize, len: usize) -> usize {
    BLOCK.min(len - block * BLOCK)
}

fn block_bytes(tag: u8, block: usize, len: usize) -> usize {
    usize::from(tag) * 2 * block_len(block, len)
}

/// Narrows all blocks as if the gradient were bfloat16: returns their tags, and the hashes of the resulting pieces.
fn narrow<G: Sync>(
    values: &[G],
    any_zero: bool,
    payload: &mut [u8],
    pool: &dyn Parallel,
    narrow_block: impl Fn(&[G], &mut [u8], bool) -> u8 + Sync,
) -> (Vec<u8>, Vec<u64>) {
    let len = values.len();
    let num_pairs = len.div_ceil(PAIR * BLOCK);
    let (mut tags, mut hashes) = (vec![ZERO; len.div_ceil(BLOCK)], vec![0; num_pairs]);
    let (all_tags, all_hashes) = (Disjoint::new(&mut tags), Disjoint::new(&mut hashes));
    let narrowed = Disjoint::new(&mut payload[..2 * len]);
    const { assert!(PAIR * BLOCK * 2 == PIECE_BYTES) };
    pool.run(num_pairs, GRAIN, &|pairs| {
        for pair in pairs {
            let range = pair * PAIR * BLOCK..len.min((pair + 1) * PAIR * BLOCK);
            // SAFETY: each pair is visited once, in this loop and below.
            let out = unsafe { narrowed.part(2 * range.start..2 * range.end) };
            let blocks = values[range].chunks(BLOCK).zip(out.chunks_mut(2 * BLOCK));
            let mut most = ZERO;
            for (index, (from, to)) in blocks.enumerate() {
                let tag = narrow_block(from, to, any_zero);
                most = most.max(tag);
                // SAFETY: as above.
                unsafe { all_tags.store(pair * PAIR + index, tag) };
            }
            if most < F32 {
                // SAFETY: as above.
                unsafe { all_hashes.store(pair, xxh3_64(out)) };
            }
        }
    });
    (tags, hashes)
}

/// Returns the tag of a block of float32, which is written as bfloat16 up to the first element that is not.
type NarrowBlock = fn(&[f32], &mut [u8], bool) -> u8;

fn narrow_block_here() -> NarrowBlock {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        return |from, to, any_zero| {
            // SAFETY: the processor has AVX2.
            unsafe { narrow_block_avx2(from, to, any_zero) }
        };
    }
    narrow_block
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn narrow_block_avx2(from: &[f32], to: &mut [u8], any_zero: bool) -> u8 {
    narrow_block(from, to, any_zero)
}

#[inline(always)]
fn narrow_block(from: &[f32], to: &mut [u8], any_zero: bool) -> u8 {
    let mut seen = 0;
    for (from, to) in from.chunks(LANES).zip(to.chunks_mut(2 * LANES)) {
        let here = from.iter().fold(0, |seen, value| seen | value.to_bits());
        if here & 0xffff != 0 {
            return F32;
        }
        seen |= here;
        for (value, out) in from.iter().zip(to.as_chunks_mut::<2>().0) {
            *out = ((value.to_bits() >> 16) as u16).to_le_bytes();
        }
    }
    tag_of_bits(seen, any_zero)
}

/// Returns the tag of a block of bfloat16, which is copied.
fn copy_block(from: &[bf16], to: &mut [u8], any_zero: bool) -> u8 {
    let seen = from.iter().fold(0, |seen, value| seen | value.to_bits());
    to.copy_from_slice(bytes_of(from));
    tag_of_bits(u32::from(seen) << 16, any_zero)
}

/// Returns the tag of a block in which these bits are set somewhere.
fn tag_of_bits(seen: u32, any_zero: bool) -> u8 {
    let seen = if any_zero { seen << 1 } else { seen };
    if seen == 0 { ZERO } else { BF16 }
}

/// Writes the table and the blocks; returns their size.
fn write_blocks(
    gradient: Gradient<'_>,
    len: usize,
    tags: &[u8],
    payload: &mut [u8],
    pool: &dyn Parallel,
) -> usize {
    let table = tag_bytes(len);
    payload[..table].fill(0);
    let mut starts = Vec::with_capacity(tags.len());
    let mut end = table;
    for (block, &tag) in tags.iter().enumerate() {
        payload[block / 4] |= tag << (2 * (block % 4));
        starts.push(end);
        end += block_bytes(tag, block, len);
    }
    let out = Disjoint::new(&mut payload[..end]);
    let narrow_block = narrow_block_here();
    pool.run(tags.len(), GRAIN, &|blocks| {
        for block in blocks.filter(|&block| tags[block] != ZERO) {
            let range = block * BLOCK..block * BLOCK + block_len(block, len);
            let start = starts[block];
            // SAFETY: blocks do not overlap, and each is visited once.
            let out = unsafe { out.part(start..start + block_bytes(tags[block], block, len)) };
            match gradient {
                Gradient::F32(values) if tags[block] == BF16 => {
                    narrow_block(&values[range], out, true);
                }
                Gradient::F32(values) => out.copy_from_slice(bytes_of(&values[range])),
                Gradient::Bf16(values) => out.copy_from_slice(bytes_of(&values[range])),
                Gradient::Zero => {}
            }
        }
    });
    end
}

/// Returns the tags of a payload of [`Encoding::Blocks`], or none if it is not one of `len` elements.
fn read_tags(payload: &[u8], len: usize) -> Option<Vec<u8>> {
    let num_blocks = len.div_ceil(BLOCK);
    let table = payload.get(..tag_bytes(len))?;
    let tag = |block: usize| (table[block / 4] >> (2 * (block % 4))) & 3;
    let padding = num_blocks..table.len() * 4;
    let tags: Vec<u8> = (0..num_blocks).map(tag).collect();
    let bytes: usize = (0..num_blocks).map(|block| block_bytes(tags[block], block, len)).sum();
    let fits = table.len() + bytes == payload.len();
    (fits && tags.iter().all(|&tag| tag <= F32) && padding.into_iter().all(|block| tag(block) == 0))
        .then_some(tags)
}

/// Whether a payload can be one of `len` elements.
pub(super) fn is_payload(encoding: Encoding, payload: &[u8], len: usize) -> bool {
    match encoding {
        Encoding::Zero => payload.is_empty(),
        Encoding::F32 => Some(payload.len()) == len.checked_mul(4),
        Encoding::Bf16 => Some(payload.len()) == len.checked_mul(2),
        Encoding::Blocks => read_tags(payload, len).is_some(),
    }
}

/// Elements in memory that NumPy and torch take over.
#[derive(Debug, Clone, PartialEq)]
pub enum Dense {
    /// float32
    F32(Vec<f32>),
    /// bfloat16
    Bf16(Vec<bf16>),
}

/// Decodes a payload of [`Encoding::Blocks`] that [`is_payload`] has accepted: as bfloat16 if that can represent all
/// elements.
pub(super) fn expand(payload: &[u8], len: usize) -> Dense {
    let tags = read_tags(payload, len).unwrap_or_default();
    if tags.contains(&F32) {
        let mut values = vec![0.0_f32; len];
        each_block(payload, &tags, len, |block, bytes, tag| {
            let out = &mut values[block * BLOCK..];
            if tag == F32 {
                let words = bytes.as_chunks::<4>().0;
                out.iter_mut().zip(words).for_each(|(out, word)| *out = f32::from_le_bytes(*word));
            } else {
                let halves = bytes.as_chunks::<2>().0;
                let widen = |half: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
                out.iter_mut().zip(halves).for_each(|(out, half)| *out = widen(half));
            }
        });
        return Dense::F32(values);
    }
    let mut values = vec![bf16::ZERO; len];
    each_block(payload, &tags, len, |block, bytes, _| {
        let halves = bytes.as_chunks::<2>().0;
        let out = values[block * BLOCK..].iter_mut().zip(halves);
        out.for_each(|(out, half)| *out = bf16::from_le_bytes(*half));
    });
    Dense::Bf16(values)
}

fn each_block(payload: &[u8], tags: &[u8], len: usize, mut body: impl FnMut(usize, &[u8], u8)) {
    let mut rest = &payload[tag_bytes(len)..];
    for (block, &tag) in tags.iter().enumerate() {
        let (bytes, after) = rest.split_at(block_bytes(tag, block, len));
        rest = after;
        if tag != ZERO {
            body(block, bytes, tag);
        }
    }
}
