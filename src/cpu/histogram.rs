//! Tokens per expert.

use super::parallel::{Disjoint, Parallel};
use crate::error::{Error, Result};

/// Ids that one task counts; a table of counts is kept per task.
pub(super) const CHUNK_IDS: usize = 1 << 16;
/// Interleaved tables, so that equal neighbours do not wait for each other's store.
const TABLES: usize = 4;

/// An expert's id as the router writes it.
pub trait Id: Copy + Send + Sync + 'static {
    /// The id as a number.
    fn number(self) -> i64;

    /// Bin of the id among `num_experts + 1`: 0 for unrouted (-1), `id + 1` for an expert. Ids out of range
    /// give a number past the last bin.
    #[inline(always)]
    fn bin(self) -> usize {
        self.number().wrapping_add(1) as usize
    }
}

impl Id for i32 {
    #[inline(always)]
    fn number(self) -> i64 {
        i64::from(self)
    }
}

impl Id for i64 {
    #[inline(always)]
    fn number(self) -> i64 {
        self
    }
}

/// Counts the ids of each expert: `counts[e] = #{ s : ids[s] == e }`; -1 is not counted.
///
/// Example: `ids = [0, 2, 2, -1]`, 3 experts: `counts = [1, 0, 2]`.
///
/// # Errors
/// [`Error::Invalid`] when an id is neither -1 nor below `counts.len()`; it names the id.
pub fn histogram<I: Id>(ids: &[I], counts: &mut [i64], pool: &impl Parallel) -> Result<()> {
    let bins = counts.len() + 1;
    let chunks = count_chunks(ids, counts.len(), pool)?;
    counts.fill(0);
    for chunk in chunks.chunks_exact(bins) {
        for (count, &here) in counts.iter_mut().zip(&chunk[1..]) {
            *count += i64::from(here);
        }
    }
    Ok(())
}

/// Counts per chunk of [`CHUNK_IDS`] ids: `[num_chunks, num_experts + 1]`, bin 0 for unrouted ids.
pub(super) fn count_chunks<I: Id>(ids: &[I], num_experts: usize, pool: &impl Parallel) -> Result<Vec<u32>> {
    let bins = num_experts + 1;
    let num_chunks = ids.len().div_ceil(CHUNK_IDS);
    let mut tables = vec![0_u32; num_chunks * bins];
    let shared = Disjoint::new(&mut tables);
    pool.run(num_chunks, 1, &|chunks| {
        let mut scratch = vec![0_u32; TABLES * (bins + 1)];
        for chunk in chunks {
            let first = chunk * CHUNK_IDS;
            let ids = &ids[first..ids.len().min(first + CHUNK_IDS)];
            // SAFETY: each chunk has its own part of the tables and is given to one thread.
            count_into(ids, unsafe { shared.part(chunk * bins..(chunk + 1) * bins) }, &mut scratch);
        }
    });
    let counted: u64 = tables.iter().map(|&count| u64::from(count)).sum();
    if counted != ids.len() as u64 {
        return Err(out_of_range(ids, num_experts));
    }
    Ok(tables)
}

/// Adds up one chunk. Ids out of range fall into a bin that is dropped, so the sum of `counts` tells of them.
fn count_into<I: Id>(ids: &[I], counts: &mut [u32], scratch: &mut [u32]) {
    let bins = counts.len();
    scratch.fill(0);
    let quads = ids.chunks_exact(TABLES);
    let (first, rest) = scratch.split_at_mut(bins + 1);
    let (second, rest) = rest.split_at_mut(bins + 1);
    let (third, fourth) = rest.split_at_mut(bins + 1);
    for id in quads.remainder() {
        first[id.bin().min(bins)] += 1;
    }
    for quad in quads {
        first[quad[0].bin().min(bins)] += 1;
        second[quad[1].bin().min(bins)] += 1;
        third[quad[2].bin().min(bins)] += 1;
        fourth[quad[3].bin().min(bins)] += 1;
    }
    for (bin, count) in counts.iter_mut().enumerate() {
        *count = first[bin] + second[bin] + third[bin] + fourth[bin];
    }
}

fn out_of_range<I: Id>(ids: &[I], num_experts: usize) -> Error {
    let slot = ids.iter().position(|id| id.bin() > num_experts).unwrap_or(0);
    let value = ids[slot].number();
    Error::Invalid(format!(
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
