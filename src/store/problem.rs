//! Conversion of errors of the object store's client into errors of the operating system.
//!
//! Callers handle a failed request as they handle a failed file operation, by its `errno`. The text says what to do where
//! the cause is known. It never contains credentials, since URLs may be signed and answers may repeat a key.

use crate::error::Error;
use std::io;

const LONGEST: usize = 400;
const NO_BUCKET: [&str; 4] =
    ["NoSuchBucket", "ContainerNotFound", "bucket does not exist", "container does not exist"];

/// `store` of the error for an object with fewer bytes than were requested. A retry does not help.
pub(super) const RANGE: &str = "range";

/// Whether the same request may succeed later: the service is unavailable, slow or overloaded.
///
/// The client has no error kind for this. A generic error is temporary, except for refusals (4xx) and wrong settings;
/// 408 (timeout) and 429 (too many requests) are temporary, too.
pub(super) fn is_passing(error: &object_store::Error) -> bool {
    if matches!(error, object_store::Error::Generic { store: RANGE, .. }) {
        return false;
    }
    let text = chain_of(error);
    matches!(error, object_store::Error::Generic { .. } | object_store::Error::JoinError { .. })
        && !["status code: 4", "without LOCATION", "builder error", "URL scheme is not allowed"]
            .iter()
            .any(|mark| text.contains(mark))
        || text.contains("status code: 408")
        || text.contains("status code: 429")
}

/// Returns the error of an operation on `what`.
pub(super) fn problem(what: &str, error: &object_store::Error) -> Error {
    use object_store::Error as E;
    let text = chain_of(error);
    let message = shortened(&text);
    let (code, message) = match error {
        E::NotFound { .. } if NO_BUCKET.iter().any(|mark| text.contains(mark)) => {
            (libc::ENOENT, format!("there is no such bucket: make it, or correct the URL ({message})"))
        }
        E::NotFound { .. } => (libc::ENOENT, format!("there is no such object ({message})")),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
            (libc::EACCES, format!("the credentials may not do this: {message}"))
        }
        E::AlreadyExists { .. } | E::Precondition { .. } => (libc::EEXIST, message),
        E::NotImplemented { .. } | E::NotSupported { .. } => (libc::EOPNOTSUPP, message),
        _ if text.contains("without LOCATION") => {
            (libc::EINVAL, format!("the bucket is in another region: set AWS_REGION ({message})"))
        }
        _ if text.contains("URL scheme is not allowed") => {
            (libc::EINVAL, format!("plain http needs AWS_ALLOW_HTTP=true or the like ({message})"))
        }
        _ if text.contains("timed out") || text.contains("operation timeout") => (libc::ETIMEDOUT, message),
        _ if text.contains("error sending request") || text.contains("connection") => {
            (libc::ECONNREFUSED, message)
        }
        _ => (libc::EIO, message),
    };
    failed(what, code, &message)
}

/// Returns an error of the operating system with its own message.
pub(super) fn failed(what: &str, code: i32, message: &str) -> Error {
    Error::io(format!("{what}: {message}"), io::Error::from_raw_os_error(code))
}

/// Returns the text of an error, without credentials and without advice.
pub(super) fn text_of(error: &object_store::Error) -> String {
    shortened(&chain_of(error))
}

/// Returns the texts of an error and of its causes: timeouts, for example, are mentioned only in a cause.
fn chain_of(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(each) = cause {
        let message = each.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = each.source();
    }
    text
}

/// Returns the text of an error without possible secrets.
///
/// Removes the queries of URLs, which may hold signatures. Of an XML answer only code and message stay.
fn shortened(text: &str) -> String {
    let head = text.split('<').next().unwrap_or_default();
    let mut words: Vec<String> = head.split_whitespace().map(without_query).collect();
    for tag in ["Code", "Message"] {
        let inside = text.split_once(&format!("<{tag}>")).and_then(|(_, rest)| rest.split_once("</"));
        words.extend(inside.map(|(found, _)| found.lines().next().unwrap_or_default().to_owned()));
    }
    let mut all = words.join(" ");
    if let Some((end, _)) = all.char_indices().nth(LONGEST) {
        all.truncate(end);
        all.push('…');
    }
    all
}

fn without_query(word: &str) -> String {
    word.split_once('?').map_or(word, |(before, _)| before).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::Error as E;

    const ANSWER: &str = "Error performing PUT https://a.blob.core.windows.net/c/k?sv=1&sig=hidden in 2ms - Server returned \
        non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?><Error><Code>InvalidAccessKeyId</Code>\
        <Message>The key is not known\nhidden</Message><AWSAccessKeyId>hidden</AWSAccessKeyId></Error>";

    #[test]
    fn messages_have_the_reason_and_no_secret() {
        let denied = E::PermissionDenied { path: "k".into(), source: ANSWER.into() };
        let Error::Io { context, source, .. } = problem("az://c/k", &denied) else { panic!() };
        assert_eq!(source.raw_os_error(), Some(libc::EACCES));
        for part in ["az://c/k", "403 Forbidden", "InvalidAccessKeyId", "The key is not known"] {
            assert!(context.contains(part), "{context}");
        }
        assert!(!context.contains("hidden"), "{context}");
    }

    #[derive(Debug, thiserror::Error)]
    #[error("HTTP error: error sending request")]
    struct Sending(#[source] io::Error);

    #[test]
    fn what_took_too_long_is_no_refused_connection() {
        let late = Sending(io::Error::other("operation timed out"));
        let Error::Io { context, source, .. } =
            problem("s3://b/k", &E::Generic { store: "S3", source: late.into() })
        else {
            panic!()
        };
        assert_eq!(source.raw_os_error(), Some(libc::ETIMEDOUT));
        assert!(context.ends_with("error sending request: operation timed out"), "{context}");
    }

    #[test]
    fn errors_are_those_of_the_operating_system() {
        let generic = |text: &str| E::Generic { store: "S3", source: text.to_owned().into() };
        let missing = |text: &str| E::NotFound { path: "k".into(), source: text.to_owned().into() };
        for (error, code, passes) in [
            (missing("<Code>NoSuchBucket</Code>"), libc::ENOENT, false),
            (missing("<Code>NoSuchKey</Code>"), libc::ENOENT, false),
            (generic("Server returned non-2xx status code: 503 Slow Down: "), libc::EIO, true),
            (generic("Server returned non-2xx status code: 429 Too Many: "), libc::EIO, true),
            (generic("Server returned non-2xx status code: 400 Bad Request: "), libc::EIO, false),
            (generic("HTTP error: operation timed out"), libc::ETIMEDOUT, true),
            (generic("HTTP error: error sending request"), libc::ECONNREFUSED, true),
            (generic("Received redirect without LOCATION"), libc::EINVAL, false),
        ] {
            let Error::Io { source, .. } = problem("k", &error) else { panic!() };
            assert_eq!((source.raw_os_error(), is_passing(&error)), (Some(code), passes), "{error}");
        }
    }
}
