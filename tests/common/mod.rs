//! Shared helpers of the exhaustive tests.

/// All lists of `size` numbers from 0 to `most`.
pub(crate) fn all(size: usize, most: i64) -> Vec<Vec<i64>> {
    (0..size).fold(vec![Vec::new()], |lists, _| {
        lists
            .iter()
            .flat_map(|list| (0..=most).map(move |next| [list.as_slice(), &[next]].concat()))
            .collect()
    })
}
