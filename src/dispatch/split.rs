//! The tables of one rank: what it sends and what it receives, for every expert.

use super::expert::{MAX_SCALE, Route, split_expert};
use crate::ensure;
use crate::error::Result;

/// What one rank sends and receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// `[experts, ranks]`: tokens of each expert that this rank sends to each rank.
    pub send: Vec<i64>,
    /// `[ranks, experts]`: tokens of each expert that this rank receives from each rank.
    pub receive: Vec<i64>,
}

/// Splits the tokens of every expert over the ranks that hold it and returns the row and column of `rank`.
///
/// `tokens` is `[experts, ranks]`: tokens of each expert on each rank. `matrix` is `[ranks, experts]`: replicas of each
/// expert on each rank. What a rank has room for stays there; the rest goes to the others in proportion to the room
/// they have left (see [`split_expert`]).
///
/// ```
/// // Two ranks, one expert with a replica on each: of 4 tokens on rank 0 two stay, two go to rank 1.
/// let split = evermoe::dispatch::split_tokens(&[4, 0], &[1, 1], 1, 2, 0)?;
/// assert_eq!(split.send, [2, 2]);
/// assert_eq!(split.receive, [2, 0]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) for wrong sizes, negative numbers, and an expert that has tokens
/// and no replica.
pub fn split_tokens(
    tokens: &[i64],
    matrix: &[i64],
    experts: usize,
    ranks: usize,
    rank: usize,
) -> Result<Split> {
    ensure!(
        tokens.len() == experts * ranks,
        "tokens: expected {experts} experts × {ranks} ranks, got {} numbers",
        tokens.len()
    );
    ensure!(
        matrix.len() == ranks * experts,
        "matrix: expected {ranks} ranks × {experts} experts, got {} numbers",
        matrix.len()
    );
    ensure!(
        rank < ranks,
        "rank: expected 0 to {} as there are {ranks} ranks, got {rank}",
        ranks.saturating_sub(1)
    );
    let mut split = Split { send: vec![0; experts * ranks], receive: vec![0; ranks * experts] };
    let mut replicas = vec![0; ranks];
    for expert in 0..experts {
        let counts = &tokens[expert * ranks..(expert + 1) * ranks];
        for (rank, replicas) in replicas.iter_mut().enumerate() {
            *replicas = matrix[rank * experts + expert];
        }
        check(expert, counts, &replicas)?;
        split_expert(counts, &replicas, |Route { source, destination, tokens }| {
            if source == rank {
                split.send[expert * ranks + destination] = tokens;
            }
            if destination == rank {
                split.receive[source * experts + expert] = tokens;
            }
        });
    }
    Ok(split)
}

/// Refuses what [`split_expert`] cannot split, with the name of the expert.
fn check(expert: usize, tokens: &[i64], replicas: &[i64]) -> Result<()> {
    if let Some(rank) = tokens.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "tokens: expert {expert} has {} tokens on rank {rank}; counts start at 0",
            tokens[rank]
        );
    }
    if let Some(rank) = replicas.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "matrix: expert {expert} has {} replicas on rank {rank}; counts start at 0",
            replicas[rank]
        );
    }
    let total: i128 = tokens.iter().map(|&count| i128::from(count)).sum();
    let held: i128 = replicas.iter().map(|&count| i128::from(count)).sum();
    ensure!(
        total == 0 || held > 0,
        "matrix: expert {expert} has {total} tokens and no replica on any rank; place it on one first"
    );
    let fits = total.checked_mul(held).is_some_and(|scale| scale <= MAX_SCALE);
    ensure!(
        fits,
        "tokens: expert {expert} has {total} tokens × {held} replicas, more than 2^61; split the batch"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_without_tokens_needs_no_replica() {
        let split = split_tokens(&[0, 0], &[0, 0], 1, 2, 1).unwrap();
        assert_eq!(split, Split { send: vec![0, 0], receive: vec![0, 0] });
    }

    #[test]
    fn errors_name_the_expert() {
        let message =
            |tokens: &[i64], matrix: &[i64]| split_tokens(tokens, matrix, 2, 1, 0).unwrap_err().to_string();
        assert!(message(&[1, 7], &[1, 0]).contains("expert 1 has 7 tokens and no replica"));
        assert!(message(&[1, -7], &[1, 1]).contains("expert 1 has -7 tokens on rank 0"));
        assert!(message(&[1, 7], &[1, -1]).contains("expert 1 has -1 replicas on rank 0"));
        assert!(message(&[1, i64::MAX], &[1, 2]).contains("more than 2^61"));
        assert!(message(&[1], &[1, 2]).starts_with("tokens: expected 2 experts × 1 ranks"));
    }
}
