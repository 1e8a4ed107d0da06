//! Early check of a provider's chain of credentials, so that missing credentials are reported before requests time out.

use super::address::Scheme;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(2);

/// Names of variables, any of which starts a provider's chain, and the metadata service that ends it.
struct Chain {
    variables: &'static [&'static str],
    metadata: &'static str,
    metadata_variable: &'static str,
    advice: &'static str,
}

const S3: Chain = Chain {
    variables: &[
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ],
    metadata: "169.254.169.254:80",
    metadata_variable: "AWS_METADATA_ENDPOINT",
    advice: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
};

const GCS: Chain = Chain {
    variables: &[
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SKIP_SIGNATURE",
        "SERVICE_ACCOUNT",
    ],
    metadata: "metadata.google.internal:80",
    metadata_variable: "GCE_METADATA_HOST",
    advice: "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
};

const AZURE: Chain = Chain {
    variables: &[
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURE_USE_AZURE_CLI",
        "AZURE_SKIP_SIGNATURE",
        "IDENTITY_ENDPOINT",
        "MSI_ENDPOINT",
    ],
    metadata: "169.254.169.254:80",
    metadata_variable: "AZURE_MSI_ENDPOINT",
    advice: "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give the machine an identity",
};

/// Returns advice if there are no credentials, or `None` if there may be some.
pub(super) fn missing(scheme: Scheme, variable: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let chain = match scheme {
        Scheme::S3 => S3,
        Scheme::Gcs => GCS,
        Scheme::Azure => AZURE,
        Scheme::Http => return None,
    };
    let has_file = scheme == Scheme::Gcs
        && variable("HOME").is_some_and(|home| {
            std::path::Path::new(&home).join(".config/gcloud/application_default_credentials.json").exists()
        });
    if has_file || chain.variables.iter().any(|name| variable(name).is_some_and(|value| !value.is_empty())) {
        return None;
    }
    let metadata = variable(chain.metadata_variable).map_or(chain.metadata.into(), |given| host_of(&given));
    let answers = |address| TcpStream::connect_timeout(&address, LIMIT).is_ok();
    let is_there = metadata.to_socket_addrs().is_ok_and(|mut found| found.any(answers));
    (!is_there).then_some(chain.advice)
}

/// Host and port of a URL, or of an address without a scheme.
fn host_of(given: &str) -> String {
    let rest = given.split_once("://").map_or(given, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default();
    if host.contains(':') { host.into() } else { format!("{host}:80") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_variable_or_a_service_that_answers_begins_a_chain() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let present = format!("http://{}/latest", listener.local_addr().unwrap());
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let with = |name: &'static str, value: &str| {
            let value = value.to_owned();
            let closed = closed.clone();
            move |asked: &str| match asked {
                asked if asked == name => Some(value.clone()),
                "AWS_METADATA_ENDPOINT" | "AZURE_MSI_ENDPOINT" | "GCE_METADATA_HOST" => Some(closed.clone()),
                _ => None,
            }
        };
        for (scheme, name, advice) in [
            (Scheme::S3, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
            (Scheme::Gcs, "GOOGLE_APPLICATION_CREDENTIALS", "service account"),
            (Scheme::Azure, "AZURE_STORAGE_ACCOUNT_KEY", "identity"),
        ] {
            assert!(missing(scheme, with("", "")).unwrap().contains(advice));
            assert_eq!(missing(scheme, with(name, "x")), None);
        }
        assert_eq!(missing(Scheme::S3, with("AWS_METADATA_ENDPOINT", &present)), None);
        assert_eq!(missing(Scheme::Http, with("", "")), None);
    }
}
