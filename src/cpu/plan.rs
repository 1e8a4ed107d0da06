//! Assigns slots to rows of the send buffer: a stable counting sort by (destination rank, expert, slot).
//!
//! Each thread places one chunk of the slots. First the slots of each expert in earlier chunks are counted. The last
//! chunk is not counted, so that a single thread reads the ids only once; placing verifies that the counts add up.

use super::histogram::{Chunks, Id, count_chunks, histogram};
use super::parallel::{Disjoint, Parallel};
use crate::ensure;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Number of ids whose rows are found before the first of them is stored.
const BLOCK_IDS: usize = 512;

/// The next rows for one expert's slots, in one segment.
#[derive(Clone, Copy, Default)]
struct Cursor {
    next_row: u32,
    end_row: u32,
}

/// The cursors of one chunk, by [`Id::bin`]. Those of bin 0 and of the last bin, which takes ids out of range, have no
/// rows.
struct Cursors {
    at: Vec<Cursor>,
    /// The rank of each expert's cursor.
    ranks: Vec<usize>,
}

/// The send buffer divided into one segment per (rank, expert), in that order.
struct Segments<'a> {
    send_counts: &'a [i64],
    /// First row of segment `rank * num_experts + expert`.
    first_rows: Vec<u32>,
    num_experts: usize,
    num_ranks: usize,
    num_rows: usize,
}

/// Orders the slots by (destination rank, expert, slot): the first `send_counts[e, 0]` slots of expert `e` go to rank
/// 0, the next `send_counts[e, 1]` to rank 1, and so on.
///
/// `ids` is `[num_slots]`, `send_counts` `[num_experts, num_ranks]`; `row_ids` and `positions` are `[num_slots]` and
/// inverse to each other: `row_ids[positions[s]] == s`. Unrouted slots (-1) have position -1, and `row_ids` ends with
/// the same number of -1.
///
/// Example: `ids = [1, 0, 1, -1, 1]`, `send_counts = [[0, 1], [2, 1]]` (2 experts, 2 ranks). Expert 1 has the
/// slots 0, 2, 4: two go to rank 0, one to rank 1; expert 0 has slot 1, for rank 1. Rows: rank 0 = slots 0, 2;
/// rank 1 = slot 1 (expert 0), slot 4 (expert 1): `row_ids = [0, 2, 1, 4, -1]`, `positions = [0, 2, 1, -1, 3]`.
///
/// # Errors
/// [`crate::Error::Invalid`] if an id is out of range, or the counts of an expert are negative or do not add up
/// to the number of its slots, naming the id or the expert.
///
/// # Panics
/// If the lengths do not match each other.
pub fn dispatch_plan<I: Id, P: Id>(
    ids: &[I],
    send_counts: &[i64],
    num_experts: usize,
    row_ids: &mut [P],
    positions: &mut [P],
    pool: &impl Parallel,
) -> Result<()> {
    assert!(row_ids.len() == ids.len() && positions.len() == ids.len());
    ensure!(ids.len() < u32::MAX as usize, "ids: expected fewer than 2**32 slots, got {}", ids.len());
    check_slots::<P>("row_ids", ids.len())?;
    let chunks = Chunks::new(ids.len(), pool.threads());
    let mut earlier = count_chunks(ids, num_experts, chunks, chunks.count().saturating_sub(1), pool)?;
    let totals = start_occurrences(&mut earlier, num_experts + 1);
    let Some(segments) = Segments::new(send_counts, num_experts, ids.len()) else {
        return Err(wrong_counts(ids, send_counts, num_experts, pool));
    };
    let skips = |chunk: usize| match chunk + 1 == chunks.count() {
        true => &totals[1..],
        false => &earlier[chunk * (num_experts + 1) + 1..][..num_experts],
    };

    let (num_placed, complete) = (AtomicUsize::new(0), AtomicBool::new(true));
    let (all_row_ids, all_positions) = (Disjoint::new(row_ids), Disjoint::new(positions));
    pool.run(chunks.count(), 1, &|taken| {
        for chunk in taken {
            let range = chunks.range(chunk);
            // SAFETY: each chunk of slots is given to one thread.
            let positions = unsafe { all_positions.part(range.clone()) };
            let placed = segments.cursors(skips(chunk)).and_then(|mut cursors| {
                segments.place(&ids[range.clone()], range.start, &mut cursors, positions, &all_row_ids)
            });
            match placed {
                Some(placed) => _ = num_placed.fetch_add(placed, Relaxed),
                None => complete.store(false, Relaxed),
            }
        }
    });
    // No expert has more slots than its counts, and the totals are equal, so no expert has fewer.
    if !complete.into_inner() || num_placed.into_inner() != segments.num_rows {
        return Err(wrong_counts(ids, send_counts, num_experts, pool));
    }
    row_ids[segments.num_rows..].fill(P::NONE);
    Ok(())
}

fn check_slots<I: Id>(name: &str, num_slots: usize) -> Result<()> {
    ensure!(num_slots <= I::MAX, "{name}: expected int64 for {num_slots} slots, got int32");
    Ok(())
}

/// Replaces the counts of each chunk by the number of equal ids in earlier chunks; returns the totals.
///
/// Example, 1 expert: counts `[[0, 2], [1, 3]]` (bins: unrouted, expert 0) become `[[0, 0], [0, 2]]`, totals `[1, 5]`.
fn start_occurrences(chunk_counts: &mut [u32], bins: usize) -> Vec<u32> {
    let mut totals = vec![0_u32; bins];
    for chunk in chunk_counts.chunks_exact_mut(bins) {
        for (total, count) in totals.iter_mut().zip(chunk) {
            *total += std::mem::replace(count, *total);
        }
    }
    totals
}

/// Returns the error for ids or counts that [`dispatch_plan`] could not place.
#[cold]
fn wrong_counts<I: Id>(ids: &[I], send_counts: &[i64], num_experts: usize, pool: &impl Parallel) -> Error {
    let mut slots_of = vec![0; num_experts];
    if let Err(error) = histogram(ids, &mut slots_of, pool) {
        return error;
    }
    let num_ranks = send_counts.len() / num_experts.max(1);
    for (expert, slots) in slots_of.into_iter().enumerate() {
        let counts = &send_counts[expert * num_ranks..][..num_ranks];
        if let Some(negative) = counts.iter().find(|&&count| count < 0) {
            return Error::invalid(format!("send_counts[{expert}] holds {negative}: expected 0 or more"));
        }
        let sum: i128 = counts.iter().map(|&count| i128::from(count)).sum();
        if sum != i128::from(slots) {
            return Error::invalid(format!(
                "send_counts of expert {expert} add up to {sum}: expected {slots}, the number of ids that name it"
            ));
        }
    }
    Error::Internal(
        "ids or send_counts changed while dispatch_plan ran: expected tensors that stay as they are".into(),
    )
}

impl<'a> Segments<'a> {
    /// None if a count is negative, or there are more rows than slots.
    fn new(send_counts: &'a [i64], num_experts: usize, num_slots: usize) -> Option<Self> {
        let num_ranks = send_counts.len().checked_div(num_experts).unwrap_or(0);
        assert_eq!(send_counts.len(), num_experts * num_ranks);
        let mut first_rows = Vec::with_capacity(send_counts.len());
        let mut row = 0;
        for rank in 0..num_ranks {
            for expert in 0..num_experts {
                first_rows.push(row as u32);
                let count = usize::try_from(send_counts[expert * num_ranks + rank]).ok()?;
                row = Some(row + count).filter(|&row| count <= num_slots && row <= num_slots)?;
            }
        }
        Some(Self { send_counts, first_rows, num_experts, num_ranks, num_rows: row })
    }

    fn segment(&self, expert: usize, rank: usize) -> Cursor {
        let next_row = self.first_rows[rank * self.num_experts + expert];
        Cursor { next_row, end_row: next_row + self.send_counts[expert * self.num_ranks + rank] as u32 }
    }

    /// Cursors past the first `skips[e]` slots of each expert; none if an expert has fewer.
    fn cursors(&self, skips: &[u32]) -> Option<Cursors> {
        // Padding at the end, so that the cursors of another thread are on other cache lines.
        let mut at = Vec::with_capacity(self.num_experts + 2 + 16);
        at.resize(self.num_experts + 2, Cursor::default());
        let mut cursors = Cursors { at, ranks: vec![0; self.num_experts] };
        if self.num_ranks == 0 {
            return Some(cursors);
        }
        for (expert, &skip) in skips.iter().enumerate() {
            cursors.at[expert + 1] = self.segment(expert, 0);
            let mut left = skip;
            loop {
                let cursor = &mut cursors.at[expert + 1];
                let step = left.min(cursor.end_row - cursor.next_row);
                cursor.next_row += step;
                left -= step;
                if left == 0 {
                    break;
                }
                self.next_rank(cursor, &mut cursors.ranks[expert], expert)?;
            }
        }
        Some(cursors)
    }

    /// Moves an expert's cursor to its next non-empty segment; none if there is none.
    fn next_rank(&self, cursor: &mut Cursor, rank: &mut usize, expert: usize) -> Option<()> {
        while *rank + 1 < self.num_ranks {
            *rank += 1;
            *cursor = self.segment(expert, *rank);
            if cursor.next_row < cursor.end_row {
                return Some(());
            }
        }
        None
    }

    /// Assigns a row to each id of a chunk, whose first slot is `first`. Returns the number of assigned rows; none if
    /// an expert had no rows left, or an id was out of range.
    fn place<I: Id, P: Id>(
        &self,
        ids: &[I],
        first: usize,
        cursors: &mut Cursors,
        positions: &mut [P],
        row_ids: &Disjoint<'_, P>,
    ) -> Option<usize> {
        let mut num_unrouted = 0;
        let blocks = ids.chunks(BLOCK_IDS).zip(positions.chunks_mut(BLOCK_IDS));
        for (block, (ids, positions)) in blocks.enumerate() {
            num_unrouted += self.find_rows(ids, cursors, positions)?;
            let first = first + block * BLOCK_IDS;
            let store = |index: usize, position: P| {
                if let Some(row) = position.get() {
                    // SAFETY: segments are disjoint and end before the number of slots; a chunk's cursors start where
                    // those of the previous chunk end, so every row is taken once.
                    unsafe { row_ids.store(row, P::new(first + index)) };
                }
            };
            let (quads, rest) = positions.as_chunks::<4>();
            for (quad, positions) in quads.iter().enumerate() {
                (0..4).for_each(|index| store(4 * quad + index, positions[index]));
            }
            let start = 4 * quads.len();
            rest.iter().enumerate().for_each(|(index, &position)| store(start + index, position));
        }
        Some(ids.len() - num_unrouted)
    }

    /// The first half of [`Segments::place`], for one block: finds the row of each id and returns the number of
    /// unrouted ids. Storing to `row_ids` immediately would make every cursor wait for the address of the previous
    /// store.
    #[inline(always)]
    fn find_rows<I: Id, P: Id>(
        &self,
        ids: &[I],
        cursors: &mut Cursors,
        positions: &mut [P],
    ) -> Option<usize> {
        let (at, ranks) = (&mut cursors.at[..], &mut cursors.ranks[..]);
        let last = ranks.len() + 1;
        assert!(at.len() == last + 1);
        let mut num_unrouted = 0;
        for (id, position) in ids.iter().zip(positions) {
            let bin = id.bin().min(last);
            let cursor = &mut at[bin];
            if cursor.next_row == cursor.end_row {
                if bin == 0 {
                    num_unrouted += 1;
                    *position = P::NONE;
                    continue;
                }
                self.next_rank(cursor, ranks.get_mut(bin - 1)?, bin - 1)?;
            }
            *position = P::new(cursor.next_row as usize);
            cursor.next_row += 1;
        }
        Some(num_unrouted)
    }
}

/// Inverts `positions` (row of each slot) into `row_ids` (slot of each row, -1 for none).
///
/// Positions at or past `row_ids.len()` name rows that are not in the buffer, and are skipped like -1.
///
/// Example: `positions = [2, -1, 0]`, 3 rows: `row_ids = [2, -1, 0]`; 2 rows: `row_ids = [2, -1]`.
///
/// # Errors
/// [`crate::Error::Invalid`] if two slots name one row, or a slot's number does not fit.
pub fn invert_positions<I: Id>(positions: &[I], row_ids: &mut [I]) -> Result<()> {
    check_slots::<I>("positions", positions.len())?;
    row_ids.fill(I::NONE);
    for (slot, &position) in positions.iter().enumerate() {
        if let Some(row) = position.get()
            && let Some(place) = row_ids.get_mut(row)
        {
            let before = place.number();
            ensure!(before < 0, "positions name row {row} twice: for slot {before} and slot {slot}");
            *place = I::new(slot);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Serial;
    use super::*;
    use proptest::prelude::*;

    /// Three threads' chunks, the last one first.
    struct Three;

    impl Parallel for Three {
        fn threads(&self) -> usize {
            3
        }

        fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
            (0..len).rev().for_each(|item| body(item..item + 1));
        }
    }

    fn plan(ids: &[i64], send_counts: &[i64], num_experts: usize) -> Result<(Vec<i64>, Vec<i64>)> {
        let (mut row_ids, mut positions) = (vec![9; ids.len()], vec![9; ids.len()]);
        dispatch_plan(ids, send_counts, num_experts, &mut row_ids, &mut positions, &Serial)?;
        let (mut narrow_rows, mut narrow_positions) = (vec![9_i32; ids.len()], vec![9_i32; ids.len()]);
        dispatch_plan(ids, send_counts, num_experts, &mut narrow_rows, &mut narrow_positions, &Three)?;
        assert!(narrow_rows.iter().map(|&slot| i64::from(slot)).eq(row_ids.iter().copied()));
        assert!(narrow_positions.iter().map(|&row| i64::from(row)).eq(positions.iter().copied()));
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
        let num_slots = (2 << 14) + 17;
        let ids: Vec<i64> = (0..num_slots as i64).map(|slot| slot * slot % 5 - 1).collect();
        check(&ids, 4, 3);
        let (mut row_ids, mut positions) = (vec![0; num_slots], vec![0; num_slots]);
        let mut refused = |ids: &[i64], counts: &[i64]| {
            let result = dispatch_plan(ids, counts, 4, &mut row_ids, &mut positions, &Three);
            result.unwrap_err().to_string()
        };
        let counts = [0, 1, 2, 3].map(|expert| ids.iter().filter(|&&id| id == expert).count() as i64);
        let moved = [counts[0] + 1, counts[1] - 1, counts[2], counts[3]];
        assert!(refused(&ids, &moved).contains("send_counts of expert 0"));
        assert!(refused(&ids, &[0, 0, 0, num_slots as i64]).contains("send_counts of expert 0"));
        for bad in [0, num_slots - 1] {
            let mut ids = ids.clone();
            ids[bad] = 4;
            assert!(refused(&ids, &counts).contains(&format!("ids[{bad}]")));
        }
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
