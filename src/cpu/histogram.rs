//! Tokens per expert.

use super::parallel::{Disjoint, Parallel};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Minimum number of ids per thread; waking another thread costs as much as counting these.
const MIN_CHUNK_IDS: usize = 1 << 14;
/// Maximum number of ids in a chunk, so that its counts cannot overflow.
const MAX_CHUNK_IDS: usize = 1 << 31;
/// Number of interleaved tables, so that equal neighbours do not wait for each other's store.
const TABLES: usize = 4;

/// The index of an expert, slot or row in tensors, int32 or int64; -1 for none.
pub trait Id: Copy + PartialEq + Send + Sync + 'static {
    /// None.
    const NONE: Self;
    /// The largest number.
    const MAX: usize;

    /// Returns the number unchanged.
    fn number(self) -> i64;

    /// Creates an id from a number that is at most [`Id::MAX`].
    fn new(number: usize) -> Self;

    /// Returns the number; none if it is negative.
    #[inline(always)]
    fn get(self) -> Option<usize> {
        usize::try_from(self.number()).ok()
    }

    /// Bin of an expert among `num_experts + 1`: 0 for unrouted (-1), `id + 1` for an expert. Ids out of range result
    /// in a number past the last bin.
    #[inline(always)]
    fn bin(self) -> usize {
        self.number().wrapping_add(1) as usize
    }
}

impl Id for i32 {
    const NONE: Self = -1;
    const MAX: usize = Self::MAX as usize;

    #[inline(always)]
    fn number(self) -> i64 {
        i64::from(self)
    }

    #[inline(always)]
    fn new(number: usize) -> Self {
        number as Self
    }
}

impl Id for i64 {
    const NONE: Self = -1;
    const MAX: usize = Self::MAX as usize;

    #[inline(always)]
    fn number(self) -> i64 {
        self
    }

    #[inline(always)]
    fn new(number: usize) -> Self {
        number as Self
    }
}

/// Counts the ids of each expert: `counts[e] = #{ s : ids[s] == e }`; -1 is not counted.
///
/// Example: `ids = [0, 2, 2, -1]`, 3 experts: `counts = [1, 0, 2]`.
///
/// # Errors
/// [`Error::Invalid`] if an id is neither -1 nor below `counts.len()`, naming the id.
pub fn histogram<I: Id>(ids: &[I], counts: &mut [i64], pool: &impl Parallel) -> Result<()> {
    let chunks = Chunks::new(ids.len(), pool.threads());
    let tables = count_chunks(ids, counts.len(), chunks, chunks.count(), pool)?;
    counts.fill(0);
    for chunk in tables.chunks_exact(counts.len() + 1) {
        for (count, &here) in counts.iter_mut().zip(&chunk[1..]) {
            *count += i64::from(here);
        }
    }
    Ok(())
}

/// Ids divided into chunks of one size (the last may be shorter): one per thread, if that is worthwhile.
#[derive(Clone, Copy)]
pub(super) struct Chunks {
    len: usize,
    size: usize,
}

impl Chunks {
    pub(super) fn new(len: usize, threads: usize) -> Self {
        Self { len, size: len.div_ceil(threads.max(1)).clamp(MIN_CHUNK_IDS, MAX_CHUNK_IDS) }
    }

    pub(super) fn count(self) -> usize {
        self.len.div_ceil(self.size)
    }

    pub(super) fn range(self, chunk: usize) -> Range<usize> {
        chunk * self.size..self.len.min((chunk + 1) * self.size)
    }
}

/// Counts of the first `num_counted` chunks: `[num_counted, num_experts + 1]`, bin 0 for unrouted ids.
pub(super) fn count_chunks<I: Id>(
    ids: &[I],
    num_experts: usize,
    chunks: Chunks,
    num_counted: usize,
    pool: &impl Parallel,
) -> Result<Vec<u32>> {
    let bins = num_experts + 1;
    let mut counts = vec![0_u32; num_counted * bins];
    let shared = Disjoint::new(&mut counts);
    let all_in_range = AtomicBool::new(true);
    pool.run(num_counted, 1, &|taken| {
        let mut tables = vec![[0_u32; TABLES]; bins + 1];
        for chunk in taken {
            // SAFETY: each chunk has its own part of the counts and is given to one thread.
            let counts = unsafe { shared.part(chunk * bins..(chunk + 1) * bins) };
            if !count_into(&ids[chunks.range(chunk)], counts, &mut tables) {
                all_in_range.store(false, Relaxed);
            }
        }
    });
    if all_in_range.into_inner() { Ok(counts) } else { Err(out_of_range(ids, num_experts)) }
}

/// Counts one chunk; false if an id is out of range. `tables` is one longer than `counts`: its last bin counts such
/// ids.
fn count_into<I: Id>(ids: &[I], counts: &mut [u32], tables: &mut [[u32; TABLES]]) -> bool {
    let last = counts.len();
    assert!(tables.len() == last + 1);
    tables.fill([0; TABLES]);
    let quads = ids.chunks_exact(TABLES);
    for id in quads.remainder() {
        tables[id.bin().min(last)][0] += 1;
    }
    for quad in quads {
        for (table, id) in quad.iter().enumerate() {
            tables[id.bin().min(last)][table] += 1;
        }
    }
    let sum = |table: &[u32; TABLES]| table.iter().sum();
    counts.iter_mut().zip(&*tables).for_each(|(count, table)| *count = sum(table));
    sum(&tables[last]) == 0
}

fn out_of_range<I: Id>(ids: &[I], num_experts: usize) -> Error {
    let slot = ids.iter().position(|id| id.bin() > num_experts).unwrap_or(0);
    let value = ids[slot].number();
    Error::invalid(format!(
        "ids[{slot}] (counted over the flattened ids) = {value} is out of range: expected -1 (unrouted) or an \
         expert below num_experts = {num_experts}"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::Serial;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counts_the_documented_example() {
        let mut counts = [9; 3];
        histogram(&[0_i64, 2, 2, -1], &mut counts, &Serial).unwrap();
        assert_eq!(counts, [1, 0, 2]);
    }

    #[test]
    fn names_the_first_bad_id() {
        for bad in [3_i32, -2, i32::MIN, i32::MAX] {
            let error = histogram(&[0, 1, bad, 99], &mut [0; 3], &Serial).unwrap_err().to_string();
            assert!(error.contains(&format!("ids[2] (counted over the flattened ids) = {bad}")), "{error}");
        }
        assert!(histogram(&[i64::MIN], &mut [0; 3], &Serial).is_err());
        assert!(histogram(&[i64::MAX], &mut [0; 3], &Serial).is_err());
    }

    #[test]
    fn accepts_no_ids_and_no_experts() {
        histogram::<i64>(&[], &mut [], &Serial).unwrap();
        histogram(&[-1_i64], &mut [], &Serial).unwrap();
        assert!(histogram(&[0_i64], &mut [], &Serial).is_err());
    }

    proptest! {
        #[test]
        fn equals_a_plain_count(ids in prop::collection::vec(-1_i32..7, 0..200)) {
            let mut counts = [0; 7];
            histogram(&ids, &mut counts, &Serial).unwrap();
            for (expert, &count) in counts.iter().enumerate() {
                prop_assert_eq!(count, ids.iter().filter(|&&id| id == expert as i32).count() as i64);
            }
        }
    }
}
