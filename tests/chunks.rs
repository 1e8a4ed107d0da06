//! Tensors to chunks and back: every byte once, in order, and what is corrupt is found.

use evermoe::cpu::{
    BLOCK_BYTES, ChunkLayout, Parallel, Piece, Serial, chunk_checksum, hash_blocks, pack_chunks,
    unpack_chunks,
};
use proptest::prelude::*;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// A loop in pieces, last one first.
struct Backwards;

impl Parallel for Backwards {
    fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        let cuts: Vec<usize> = (0..=len).step_by(3).chain([len]).collect();
        cuts.windows(2).rev().filter(|cut| cut[0] < cut[1]).for_each(|cut| body(cut[0]..cut[1]));
    }
}

/// The chunks, made byte by byte from the pieces.
fn by_pieces(layout: &ChunkLayout, tensors: &[Vec<u8>]) -> Vec<u8> {
    let mut chunks = vec![0; layout.num_chunks() * layout.chunk_bytes()];
    for Piece { tensor, tensor_offset, chunk, chunk_offset, bytes } in layout.pieces() {
        let at = chunk * layout.chunk_bytes() + chunk_offset;
        chunks[at..at + bytes].copy_from_slice(&tensors[tensor][tensor_offset..tensor_offset + bytes]);
    }
    chunks
}

fn fill(sizes: &[usize]) -> Vec<Vec<u8>> {
    let byte = |tensor: usize, i: usize| (tensor * 31 + i * 7 + i / 251 + 1) as u8;
    sizes.iter().enumerate().map(|(tensor, &size)| (0..size).map(|i| byte(tensor, i)).collect()).collect()
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![
        0..40_usize,
        4000..4200_usize,
        0..30_000_usize,
        (0..8_usize).prop_map(|n| n * BLOCK_BYTES)
    ];
    prop::collection::vec(size, 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pieces_hold_every_byte_once_in_order(sizes in sizes(), blocks in 1..5_usize) {
        let layout = ChunkLayout::new(&sizes, blocks * BLOCK_BYTES).unwrap();
        let (mut end, mut seen) = (0, vec![0; sizes.len()]);
        for piece in layout.pieces() {
            let start = piece.chunk * layout.chunk_bytes() + piece.chunk_offset;
            prop_assert!(start >= end && piece.bytes > 0 && piece.chunk < layout.num_chunks());
            prop_assert!(piece.chunk_offset + piece.bytes <= layout.chunk_bytes());
            prop_assert_eq!(start, layout.starts()[piece.tensor] + piece.tensor_offset);
            prop_assert_eq!(piece.tensor_offset, seen[piece.tensor]);
            seen[piece.tensor] += piece.bytes;
            end = start + piece.bytes;
        }
        prop_assert_eq!(seen, &sizes[..]);
        prop_assert!(layout.starts().iter().all(|start| start.is_multiple_of(16)));
        prop_assert!(layout.num_chunks() * layout.chunk_bytes() < end.next_multiple_of(16) + layout.chunk_bytes());
    }

    #[test]
    fn there_and_back(sizes in sizes(), blocks in 1..5_usize) {
        let layout = ChunkLayout::new(&sizes, blocks * BLOCK_BYTES).unwrap();
        let tensors = fill(&sizes);
        let slices: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let expected = by_pieces(&layout, &tensors);
        for pool in [&Serial as &dyn Parallel, &Backwards] {
            let (mut chunks, mut hashes) = (vec![0xee; expected.len()], vec![0; expected.len() / BLOCK_BYTES]);
            pack_chunks(&layout, 0, &slices, &mut chunks, &mut hashes, pool).unwrap();
            prop_assert!(chunks == expected);
            let direct: Vec<i64> = chunks.chunks(BLOCK_BYTES).map(|block| xxh3_64(block) as i64).collect();
            prop_assert_eq!(&hashes, &direct);
            let mut again = vec![0; hashes.len()];
            hash_blocks(&chunks, &mut again, pool).unwrap();
            prop_assert_eq!(&again, &hashes);
            let mut back: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0xee; size]).collect();
            let mut into: Vec<&mut [u8]> = back.iter_mut().map(Vec::as_mut_slice).collect();
            let mut wrong = vec![9; layout.num_chunks()];
            unpack_chunks(&layout, 0, &chunks, &hashes, &mut into, &mut wrong, pool).unwrap();
            prop_assert!(back == tensors && wrong.iter().all(|&count| count == 0));
        }
    }

    #[test]
    fn a_flipped_bit_is_found_and_its_block_not_written(sizes in sizes(), blocks in 1..4_usize, at: usize, bit in 0..8_u32) {
        let layout = ChunkLayout::new(&sizes, blocks * BLOCK_BYTES).unwrap();
        prop_assume!(layout.num_chunks() > 0);
        let tensors = fill(&sizes);
        let mut chunks = by_pieces(&layout, &tensors);
        let mut hashes = vec![0; chunks.len() / BLOCK_BYTES];
        hash_blocks(&chunks, &mut hashes, &Serial).unwrap();
        let at = at % chunks.len();
        chunks[at] ^= 1_u8 << bit;
        let mut back: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0; size]).collect();
        let mut into: Vec<&mut [u8]> = back.iter_mut().map(Vec::as_mut_slice).collect();
        let mut wrong = vec![9; layout.num_chunks()];
        unpack_chunks(&layout, 0, &chunks, &hashes, &mut into, &mut wrong, &Serial).unwrap();
        let expected: Vec<i64> = (0..layout.num_chunks()).map(|c| i64::from(c == at / layout.chunk_bytes())).collect();
        prop_assert_eq!(wrong, expected);
        let mut right = by_pieces(&layout, &tensors);
        right[at / BLOCK_BYTES * BLOCK_BYTES..][..BLOCK_BYTES].fill(0);
        prop_assert!(by_pieces(&layout, &back) == right);
    }
}

/// Any range of chunks equals that part of all of them, in both directions.
#[test]
fn ranges_of_chunks() {
    let sizes = [10_000, 3, 0, 30_000, 4096];
    let (layout, tensors) = (ChunkLayout::new(&sizes, 8192).unwrap(), fill(&sizes));
    let slices: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
    let all = by_pieces(&layout, &tensors);
    let mut back: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0xee; size]).collect();
    for (first, end) in [(4, 6), (0, 1), (1, 4), (2, 2)] {
        let (mut chunks, mut hashes) = (vec![0xee; (end - first) * 8192], vec![0; (end - first) * 2]);
        pack_chunks(&layout, first, &slices, &mut chunks, &mut hashes, &Backwards).unwrap();
        assert!(chunks == all[first * 8192..end * 8192]);
        let mut into: Vec<&mut [u8]> = back.iter_mut().map(Vec::as_mut_slice).collect();
        let mut wrong = vec![9; end - first];
        unpack_chunks(&layout, first, &chunks, &hashes, &mut into, &mut wrong, &Backwards).unwrap();
        assert!(wrong.iter().all(|&count| count == 0));
    }
    assert_eq!(layout.num_chunks(), 6);
    assert!(back == tensors);
    let (mut chunks, mut hashes) = (vec![0; 2 * 8192], vec![0; 4]);
    for first in [5, 7] {
        let beyond = pack_chunks(&layout, first, &slices, &mut chunks, &mut hashes, &Serial);
        assert!(beyond.unwrap_err().to_string().contains("at most 6"));
    }
}

/// Large enough to be written past the cache, from addresses of every alignment.
#[test]
fn large_and_unaligned() {
    let memory = fill(&[20 << 20]).remove(0);
    let (first, second) = (&memory[3..11_000_000], &memory[11_000_001..]);
    let layout = ChunkLayout::new(&[first.len(), second.len()], 1 << 20).unwrap();
    let mut chunks = vec![0xee; layout.num_chunks() << 20];
    let mut hashes = vec![0; chunks.len() / BLOCK_BYTES];
    pack_chunks(&layout, 0, &[first, second], &mut chunks, &mut hashes, &Backwards).unwrap();
    assert!(chunks == by_pieces(&layout, &[first.to_vec(), second.to_vec()]));
    let mut back = vec![0; memory.len() + 1];
    let (one, two) = back.split_at_mut(first.len() + 1);
    let mut wrong = vec![9; layout.num_chunks()];
    let mut into = [&mut one[1..], &mut two[..second.len()]];
    unpack_chunks(&layout, 0, &chunks, &hashes, &mut into, &mut wrong, &Backwards).unwrap();
    assert!(into[0] == first && into[1] == second && wrong.iter().all(|&count| count == 0));
}

#[test]
fn a_checksum_is_the_hash_of_the_hashes() {
    let hashes = [1_i64, -2, i64::MIN];
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    assert_eq!(chunk_checksum(&hashes), xxh3_64(&bytes));
    assert_ne!(chunk_checksum(&hashes), chunk_checksum(&hashes[..2]));
}

#[test]
fn what_does_not_fit_is_refused() {
    for chunk_bytes in [0, 1, 4095, 5000] {
        assert!(ChunkLayout::new(&[1], chunk_bytes).unwrap_err().to_string().contains("multiple of 4096"));
    }
    assert!(ChunkLayout::new(&[usize::MAX, 3], 4096).unwrap_err().to_string().contains("tensor 0"));
    assert!(ChunkLayout::new(&[isize::MAX as usize - 4096], 4096).is_err());
    let layout = ChunkLayout::new(&[10], 4096).unwrap();
    let (mut chunks, mut hashes) = (vec![0; 4096], vec![0; 1]);
    let told = |result: evermoe::Result<()>| result.unwrap_err().to_string();
    assert!(
        told(pack_chunks(&layout, 0, &[&[0; 9]], &mut chunks, &mut hashes, &Serial))
            .contains("sizes of the layout")
    );
    assert!(
        told(pack_chunks(&layout, 0, &[&[0; 10]], &mut chunks[1..], &mut hashes, &Serial))
            .contains("got 4095")
    );
    assert!(told(pack_chunks(&layout, 0, &[&[0; 10]], &mut chunks, &mut [], &Serial)).contains("hashes"));
    let result = unpack_chunks(&layout, 0, &chunks, &hashes, &mut [&mut [0; 10]], &mut [], &Serial);
    assert!(told(result).contains("wrong: expected 1 numbers, got 0"));
    assert!(told(hash_blocks(&chunks[..4000], &mut hashes, &Serial)).contains("for 4000 bytes"));
}
