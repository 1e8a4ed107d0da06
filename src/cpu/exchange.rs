//! Regroups rows that were exchanged between ranks: from the order of their sources to that of their experts, and back.

use super::memory::{STREAM_BYTES, copy, finish_stream};
use super::parallel::{Disjoint, Parallel};
use crate::ensure;
use crate::error::Result;

/// Bytes of the output per task: full cache lines, and pages if it starts on one.
const BLOCK_BYTES: usize = 4096;
/// Minimum number of blocks for a further thread.
const GRAIN_BLOCKS: usize = 16;

/// Rows of one source for one expert, which are adjacent on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    /// First byte in the input.
    from: usize,
    /// First byte in the output.
    to: usize,
    bytes: usize,
}

/// Copies rows ordered by (source, expert) into the order of (expert, source); `inverse` copies them back.
///
/// `counts` is `[sources, experts]` and adds up to `num_rows`, which `rows` and `out` hold.
///
/// Example: `counts = [[1, 2], [3, 0]]`, rows `a | b c || d e f |` give `a d e f | b c`; the inverse gives them back.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for a negative count, and for counts that do not add up to the rows.
pub fn regroup(
    rows: &[u8],
    counts: &[i64],
    experts: usize,
    num_rows: usize,
    inverse: bool,
    out: &mut [u8],
    pool: &impl Parallel,
) -> Result<()> {
    check_counts(counts, experts, num_rows)?;
    let segments = segments(counts, experts, rows.len().checked_div(num_rows).unwrap_or(0), inverse);
    let (len, stream) = (out.len(), out.len() >= STREAM_BYTES);
    assert_eq!(rows.len(), len);
    let out = Disjoint::new(out);
    pool.run(len.div_ceil(BLOCK_BYTES), GRAIN_BLOCKS, &|blocks| {
        let (begin, end) = (blocks.start * BLOCK_BYTES, len.min(blocks.end * BLOCK_BYTES));
        let first = segments.partition_point(|segment| segment.to + segment.bytes <= begin);
        for segment in segments[first..].iter().take_while(|segment| segment.to < end) {
            let (start, stop) = (segment.to.max(begin), end.min(segment.to + segment.bytes));
            let from = segment.from + (start - segment.to);
            // SAFETY: only this thread uses the blocks, and the segments do not overlap.
            copy(&rows[from..from + (stop - start)], unsafe { out.part(start..stop) }, stream);
        }
        if stream {
            finish_stream();
        }
    });
    Ok(())
}

fn check_counts(counts: &[i64], experts: usize, num_rows: usize) -> Result<()> {
    if let Some(cell) = counts.iter().position(|&count| count < 0) {
        let (source, expert) = (cell / experts, cell % experts);
        ensure!(false, "counts[{source}, {expert}] = {}: expected 0 rows or more", counts[cell]);
    }
    let sum: i128 = counts.iter().map(|&count| i128::from(count)).sum();
    ensure!(sum == num_rows as i128, "counts add up to {sum}: expected {num_rows}, the number of rows");
    Ok(())
}

/// The segments with at least one byte, in the order of the output.
fn segments(counts: &[i64], experts: usize, row_bytes: usize, inverse: bool) -> Vec<Segment> {
    // In the order of (source, expert), then of (expert, source).
    let sources = counts.len().checked_div(experts).unwrap_or(0);
    let mut by_source = Vec::with_capacity(counts.len());
    let mut from = 0;
    for &count in counts {
        let bytes = count as usize * row_bytes;
        by_source.push(Segment { from, to: 0, bytes });
        from += bytes;
    }
    let mut to = 0;
    for expert in 0..experts {
        for source in 0..sources {
            let segment = &mut by_source[source * experts + expert];
            segment.to = to;
            to += segment.bytes;
        }
    }
    by_source.retain(|segment| segment.bytes > 0);
    if inverse {
        by_source.iter_mut().for_each(|segment| std::mem::swap(&mut segment.from, &mut segment.to));
    } else {
        by_source.sort_unstable_by_key(|segment| segment.to);
    }
    by_source
}

#[cfg(test)]
mod tests {
    use super::super::Serial;
    use super::*;
    use proptest::prelude::*;

    /// Blocks one by one, last first.
    struct Backwards;

    impl Parallel for Backwards {
        fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
            (0..len).rev().for_each(|block| body(block..block + 1));
        }
    }

    fn regrouped(rows: &[u8], counts: &[i64], experts: usize, inverse: bool) -> Vec<u8> {
        let mut out = vec![0; rows.len()];
        let num_rows = counts.iter().sum::<i64>() as usize;
        regroup(rows, counts, experts, num_rows, inverse, &mut out, &Backwards).unwrap();
        out
    }

    #[test]
    fn the_example_of_the_documentation() {
        let counts = [1, 2, 3, 0];
        assert_eq!(regrouped(b"abcdef", &counts, 2, false), b"adefbc");
        assert_eq!(regrouped(b"adefbc", &counts, 2, true), b"abcdef");
    }

    #[test]
    fn errors_name_the_counts() {
        let message = |counts: &[i64], rows: &[u8]| {
            regroup(rows, counts, 2, rows.len(), false, &mut rows.to_vec(), &Serial).unwrap_err().to_string()
        };
        assert!(message(&[1, 2, 3, 0], b"abcd").contains("counts add up to 6: expected 4"));
        assert!(message(&[1, 2, 3, -2], b"abcd").contains("counts[1, 1] = -2: expected 0 rows"));
        assert!(message(&[i64::MAX; 4], b"").contains("expected 0"));
    }

    #[test]
    fn rows_without_bytes_and_experts_without_rows() {
        assert_eq!(regrouped(&[], &[1, 2], 2, false), [0; 0]);
        assert_eq!(regrouped(&[], &[], 0, false), [0; 0]);
    }

    #[test]
    fn large_outputs_are_streamed() {
        let rows: Vec<u8> = (0..STREAM_BYTES + 4 * 3000).map(|byte| (byte / 7 % 251) as u8).collect();
        let total = (rows.len() / 4) as i64;
        let counts = [1, total / 3, 5, total - 7 - 2 * (total / 3), total / 3, 1];
        let grouped = regrouped(&rows, &counts, 3, false);
        assert!(grouped != rows && regrouped(&grouped, &counts, 3, true) == rows);
    }

    proptest! {
        #[test]
        fn sorts_by_expert_and_comes_back(
            (experts, counts) in (1_usize..6, 1_usize..6).prop_flat_map(|(experts, sources)| {
                (Just(experts), prop::collection::vec(0_i64..9, experts * sources))
            }),
            row_bytes in 1_usize..900,
        ) {
            let mut expected = Vec::new();
            let mut rows = Vec::new();
            for (cell, &count) in counts.iter().enumerate() {
                for row in 0..count as usize {
                    let bytes: Vec<u8> = (0..row_bytes).map(|byte| (cell * 31 + row * 7 + byte) as u8).collect();
                    expected.push((cell % experts, cell, row, bytes.clone()));
                    rows.extend(bytes);
                }
            }
            expected.sort();
            let expected: Vec<u8> = expected.into_iter().flat_map(|row| row.3).collect();
            prop_assert_eq!(&regrouped(&rows, &counts, experts, false), &expected);
            prop_assert_eq!(regrouped(&expected, &counts, experts, true), rows);
        }
    }
}
