//! Replicas by node, as sparse rows.

/// Experts that each node holds, ascending, with the number of their replicas.
pub(crate) type Rows = Vec<Vec<(usize, i64)>>;

/// The rows of a matrix `[nodes, experts]`.
///
/// ```text
/// 2 0 1      (0 2) (2 1)
/// 0 0 0  →
/// ```
pub(crate) fn rows_of(matrix: &[i64], experts: usize) -> Rows {
    let row = |row: &[i64]| {
        let held = row.iter().enumerate().filter(|(_, count)| **count > 0);
        held.map(|(expert, &count)| (expert, count)).collect()
    };
    matrix.chunks_exact(experts).map(row).collect()
}

/// The matrix `[nodes, experts]` of rows.
pub(crate) fn matrix_of<'a>(
    rows: impl ExactSizeIterator<Item = &'a [(usize, i64)]>,
    experts: usize,
) -> Vec<i64> {
    let mut matrix = vec![0; rows.len() * experts];
    for (cells, row) in matrix.chunks_exact_mut(experts).zip(rows) {
        row.iter().for_each(|&(expert, count)| cells[expert] = count);
    }
    matrix
}

/// Adds a replica of an expert to a node's row.
pub(super) fn add(row: &mut Vec<(usize, i64)>, expert: usize) {
    match row.binary_search_by_key(&expert, |&(held, _)| held) {
        Ok(at) => row[at].1 += 1,
        Err(at) => row.insert(at, (expert, 1)),
    }
}

/// The nodes that hold each expert, ascending.
pub(super) fn holders_of(rows: &Rows, experts: usize) -> Vec<Vec<usize>> {
    let mut holders = vec![Vec::new(); experts];
    for (node, row) in rows.iter().enumerate() {
        row.iter().for_each(|&(expert, _)| holders[expert].push(node));
    }
    holders
}

/// Rows whose expert `e` is `number[e]` now.
pub(super) fn renumbered(rows: &[Vec<(usize, i64)>], number: &[usize]) -> Rows {
    let row = |row: &Vec<(usize, i64)>| {
        let mut row: Vec<(usize, i64)> = row.iter().map(|&(expert, count)| (number[expert], count)).collect();
        row.sort_unstable();
        row
    };
    rows.iter().map(row).collect()
}
