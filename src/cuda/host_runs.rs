//! Transfers directly to the tensors' places in host memory, without chunks in between.

use crate::cpu::ChunkLayout;
use std::ops::Range;

/// Bytes that are consecutive both in the stream of chunks and on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostRun {
    /// First byte in the stream.
    pub(super) from: usize,
    /// First byte on the host.
    pub(super) to: usize,
    /// Length, above 0.
    pub(super) bytes: usize,
}

/// Returns the runs of a part of the stream, when tensor t is at `places[t]` on the host. Gaps between tensors are left
/// out.
///
/// Example: tensors of 16 and 5 bytes at 64 and 80 are adjacent in both: one run of 21 bytes. At 64 and 128 they are
/// two runs.
pub(super) fn runs(layout: &ChunkLayout, places: &[usize], part: &Range<usize>) -> Vec<HostRun> {
    let mut runs: Vec<HostRun> = vec![];
    let first = layout.starts().partition_point(|&start| start <= part.start).saturating_sub(1);
    for (tensor, &place) in places.iter().enumerate().skip(first) {
        let start = layout.starts()[tensor];
        if start >= part.end {
            break;
        }
        let (from, end) = (start.max(part.start), (start + layout.sizes()[tensor]).min(part.end));
        if from >= end {
            continue;
        }
        let (to, bytes) = (place + from - start, end - from);
        match runs.last_mut() {
            Some(last) if last.from + last.bytes == from && last.to + last.bytes == to => last.bytes += bytes,
            _ => runs.push(HostRun { from, to, bytes }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_every_tensor_has_its_place_once() {
        let sizes = [5000, 0, 16, 4080, 3, 0, 9000, 7];
        let layout = ChunkLayout::new(&sizes, 4096).unwrap();
        let end = layout.num_chunks() * 4096;
        // Consecutive, as in an arena's unit.
        let places: Vec<usize> =
            sizes.iter().scan(64, |at, size| Some(std::mem::replace(at, *at + size))).collect();
        for step in [4096, 8192, end] {
            let mut host = vec![usize::MAX; 64 + sizes.iter().sum::<usize>()];
            for part in (0..end).step_by(step) {
                for run in runs(&layout, &places, &(part..part + step)) {
                    assert!(run.bytes > 0 && run.from >= part && run.from + run.bytes <= part + step);
                    for byte in 0..run.bytes {
                        let old = std::mem::replace(&mut host[run.to + byte], run.from + byte);
                        assert_eq!(old, usize::MAX, "twice");
                    }
                }
            }
            for (tensor, (&place, &size)) in places.iter().zip(&sizes).enumerate() {
                assert!(
                    (0..size).all(|byte| host[place + byte] == layout.starts()[tensor] + byte),
                    "{tensor}"
                );
            }
        }
        let run = |from, to, bytes| HostRun { from, to, bytes };
        // The tensors of 16 and 4080 bytes are adjacent in both.
        assert_eq!(runs(&layout, &places, &(4096..8192)), [run(4096, 64 + 4096, 904), run(5008, 5064, 3184)]);
    }
}
