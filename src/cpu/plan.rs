//! Which row of the send buffer each slot takes: a stable counting sort by (destination rank, expert, slot).

use super::histogram::{CHUNK_IDS, Id, count_chunks};
use super::parallel::{Disjoint, Parallel};
use crate::ensure;
use crate::error::Result;

/// Where the next slot of one expert goes.
#[derive(Clone, Copy)]
struct Cursor {
    next_row: i64,
    /// First row that is no longer this rank's.
    end_row: i64,
    rank: usize,
}

/// The send buffer cut into one segment per (rank, expert), in that order.
struct Segments<'a> {
    send_counts: &'a [i64],
    /// First row of segment `rank * num_experts + expert`.
    first_rows: Vec<i64>,
    num_experts: usize,
    num_ranks: usize,
}

/// Orders the slots by (destination rank, expert, slot): the first `send_counts[e, 0]` slots of expert `e` go
/// to rank 0, the next `send_counts[e, 1]` to rank 1, and so on.
///
/// `ids` is `[num_slots]`, `send_counts` `[num_experts, num_ranks]`; `row_ids` and `positions` are `[num_slots]`
/// and inverse to each other: `row_ids[positions[s]] == s`. Unrouted slots (-1) have position -1 and leave as
/// many -1 at the end of `row_ids`.
///
/// Example: `ids = [1, 0, 1, -1, 1]`, `send_counts = [[0, 1], [2, 1]]` (2 experts, 2 ranks). Expert 1 has the
/// slots 0, 2, 4: two go to rank 0, one to rank 1; expert 0 has slot 1, for rank 1. Rows: rank 0 = slots 0, 2;
/// rank 1 = slot 1 (expert 0), slot 4 (expert 1): `row_ids = [0, 2, 1, 4, -1]`, `positions = [0, 2, 1, -1, 3]`.
///
/// # Errors
/// [`crate::error::Error::Invalid`] when an id is out of range, or the counts of an expert are negative or do
/// not add up to the number of its slots; it names the id or the expert.
///
/// # Panics
/// When the lengths do not match each other.
pub fn dispatch_plan<I: Id>(
    ids: &[I],
    send_counts: &[i64],
    num_experts: usize,
    row_ids: &mut [i64],
    positions: &mut [i64],
    pool: &impl Parallel,
) -> Result<()> {
    assert!(row_ids.len() == ids.len() && positions.len() == ids.len());
    ensure!(ids.len() < u32::MAX as usize, "ids: expected fewer than 2**32 slots, got {}", ids.len());
    let mut chunk_counts = count_chunks(ids, num_experts, pool)?;
    let bins = num_experts + 1;
    let totals = start_occurrences(&mut chunk_counts, bins);
    let segments = Segments::new(send_counts, num_experts, &totals)?;

    let num_rows: u64 = totals[1..].iter().sum();
    row_ids[num_rows as usize..].fill(-1);
    let (row_ids, positions) = (Disjoint::new(row_ids), Disjoint::new(positions));
    pool.run(ids.len().div_ceil(CHUNK_IDS), 1, &|chunks| {
        for chunk in chunks {
            let first = chunk * CHUNK_IDS;
            let ids = &ids[first..ids.len().min(first + CHUNK_IDS)];
            let mut cursors = segments.cursors(&chunk_counts[chunk * bins + 1..(chunk + 1) * bins]);
            // SAFETY: each chunk of slots is given to one thread.
            let positions = unsafe { positions.part(first..first + ids.len()) };
            segments.place(ids, first, &mut cursors, positions, &row_ids);
        }
    });
    Ok(())
}

/// Replaces the counts of each chunk by the number of equal ids in earlier chunks; returns the totals.
///
/// Example, 1 expert: counts `[[0, 2], [1, 3]]` (bins: unrouted, expert 0) become `[[0, 0], [0, 2]]`, totals `[1, 5]`.
fn start_occurrences(chunk_counts: &mut [u32], bins: usize) -> Vec<u64> {
    let mut totals = vec![0_u64; bins];
    for chunk in chunk_counts.chunks_exact_mut(bins) {
        for (total, count) in totals.iter_mut().zip(chunk) {
            let here = u64::from(*count);
            *count = *total as u32;
            *total += here;
        }
    }
    totals
}

impl<'a> Segments<'a> {
    /// `totals[e + 1]` is the number of slots of expert `e`.
    fn new(send_counts: &'a [i64], num_experts: usize, totals: &[u64]) -> Result<Self> {
        let num_ranks = send_counts.len().checked_div(num_experts).unwrap_or(0);
        assert_eq!(send_counts.len(), num_experts * num_ranks);
        for (expert, &slots) in totals[1..].iter().enumerate() {
            let counts = &send_counts[expert * num_ranks..(expert + 1) * num_ranks];
            let sum: i128 = counts.iter().map(|&count| i128::from(count)).sum();
            let negative = counts.iter().find(|&&count| count < 0);
            ensure!(
                negative.is_none(),
                "send_counts[{expert}] holds {}: expected 0 or more",
                negative.unwrap()
            );
            ensure!(
                sum == i128::from(slots),
                "send_counts of expert {expert} add up to {sum}: expected {slots}, the number of ids that name it"
            );
        }
        let mut first_rows = Vec::with_capacity(send_counts.len());
        let mut row = 0;
        for rank in 0..num_ranks {
            for expert in 0..num_experts {
                first_rows.push(row);
                row += send_counts[expert * num_ranks + rank];
            }
        }
        Ok(Self { send_counts, first_rows, num_experts, num_ranks })
    }

    fn segment(&self, expert: usize, rank: usize) -> Cursor {
        let next_row = self.first_rows[rank * self.num_experts + expert];
        Cursor { next_row, end_row: next_row + self.send_counts[expert * self.num_ranks + rank], rank }
    }

    /// One cursor per expert, past the first `skip[e]` of its slots.
    fn cursors(&self, skip: &[u32]) -> Vec<Cursor> {
        let at = |(expert, &skip): (usize, &u32)| {
            let mut left = i64::from(skip);
            let mut cursor = self.segment(expert, 0);
            while left > cursor.end_row - cursor.next_row {
                left -= cursor.end_row - cursor.next_row;
                cursor = self.segment(expert, cursor.rank + 1);
            }
            cursor.next_row += left;
            cursor
        };
        if self.num_ranks == 0 { Vec::new() } else { skip.iter().enumerate().map(at).collect() }
    }

    /// Gives each id of a chunk its row. The chunk's first slot is `first`.
    fn place<I: Id>(
        &self,
        ids: &[I],
        first: usize,
        cursors: &mut [Cursor],
        positions: &mut [i64],
        row_ids: &Disjoint<'_, i64>,
    ) {
        for (index, (id, position)) in ids.iter().zip(positions).enumerate() {
            let bin = id.bin();
            if bin == 0 {
                *position = -1;
                continue;
            }
            let cursor = &mut cursors[bin - 1];
            while cursor.next_row == cursor.end_row {
                *cursor = self.segment(bin - 1, cursor.rank + 1);
            }
            let row = cursor.next_row;
            cursor.next_row += 1;
            *position = row;
            // SAFETY: the counts add up to the slots of each expert, so segments are disjoint, below the number of
            // slots, and every row is taken once, over all chunks.
            unsafe { row_ids.store(row as usize, (first + index) as i64) };
        }
    }
}

/// Turns `positions` (row of each slot) into `row_ids` (slot of each row, -1 where none).
///
/// Positions at or past `row_ids.len()` name rows that the buffer does not hold, and are skipped as -1 is.
///
/// Example: `positions = [2, -1, 0]`, 3 rows: `row_ids = [2, -1, 0]`; 2 rows: `row_ids = [2, -1]`.
///
/// # Errors
/// [`crate::error::Error::Invalid`] when two slots name one row.
pub fn invert_positions(positions: &[i64], row_ids: &mut [i64]) -> Result<()> {
    row_ids.fill(-1);
    for (slot, &position) in positions.iter().enumerate() {
        if let Ok(row) = usize::try_from(position)
            && let Some(place) = row_ids.get_mut(row)
        {
            ensure!(*place < 0, "positions name row {row} twice: for slot {} and slot {slot}", *place);
            *place = slot as i64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Serial;
    use super::*;
    use proptest::prelude::*;

    fn plan(ids: &[i64], send_counts: &[i64], num_experts: usize) -> Result<(Vec<i64>, Vec<i64>)> {
        let (mut row_ids, mut positions) = (vec![9; ids.len()], vec![9; ids.len()]);
        dispatch_plan(ids, send_counts, num_experts, &mut row_ids, &mut positions, &Serial)?;
        Ok((row_ids, positions))
    }

    #[test]
    fn gives_the_documented_example() {
        let (row_ids, positions) = plan(&[1, 0, 1, -1, 1], &[0, 1, 2, 1], 2).unwrap();
        assert_eq!(row_ids, [0, 2, 1, 4, -1]);
        assert_eq!(positions, [0, 2, 1, -1, 3]);
    }

    #[test]
    fn names_the_expert_whose_counts_are_wrong() {
        let error = plan(&[0, 1, 1], &[1, 3], 2).unwrap_err().to_string();
        assert!(error.contains("expert 1 add up to 3: expected 2"), "{error}");
        let error = plan(&[0], &[2, -1], 1).unwrap_err().to_string();
        assert!(error.contains("send_counts[0] holds -1"), "{error}");
        assert!(plan(&[0], &[i64::MAX, i64::MAX], 1).is_err());
    }

    #[test]
    fn works_across_chunks() {
        let num_slots = 2 * CHUNK_IDS + 17;
        let ids: Vec<i64> = (0..num_slots as i64).map(|slot| slot * slot % 5 - 1).collect();
        check(&ids, 4, 3);
    }

    #[test]
    fn inverts_a_prefix_and_refuses_duplicates() {
        let mut row_ids = [9; 2];
        invert_positions(&[2, -1, 0], &mut row_ids).unwrap();
        assert_eq!(row_ids, [2, -1]);
        assert!(invert_positions(&[1, 1], &mut row_ids).is_err());
    }

    /// Spreads the slots of each expert unevenly over the ranks, and compares with a sort.
    fn check(ids: &[i64], num_experts: usize, num_ranks: usize) {
        let mut send_counts = vec![0; num_experts * num_ranks];
        let mut keyed = Vec::new();
        for expert in 0..num_experts {
            let slots: Vec<usize> = (0..ids.len()).filter(|&slot| ids[slot] == expert as i64).collect();
            for (occurrence, &slot) in slots.iter().enumerate() {
                let rank = (occurrence * occurrence * num_ranks) / (slots.len() * slots.len());
                send_counts[expert * num_ranks + rank] += 1;
                keyed.push((rank, expert, slot));
            }
        }
        keyed.sort_unstable();
        let (row_ids, positions) = plan(ids, &send_counts, num_experts).unwrap();
        for (row, &(_, _, slot)) in keyed.iter().enumerate() {
            assert_eq!((row_ids[row], positions[slot]), (slot as i64, row as i64));
        }
        assert!(row_ids[keyed.len()..].iter().all(|&slot| slot == -1));
        assert!(ids.iter().zip(&positions).all(|(&id, &position)| (id < 0) == (position < 0)));
        let mut inverse = vec![0; ids.len()];
        invert_positions(&positions, &mut inverse).unwrap();
        assert_eq!(inverse, row_ids);
    }

    proptest! {
        #[test]
        fn equals_a_sort(ids in prop::collection::vec(-1_i64..6, 0..120), num_ranks in 1_usize..5) {
            check(&ids, 6, num_ranks);
        }
    }
}
