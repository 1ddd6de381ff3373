package io.mongomedallion.storage;

import java.io.IOException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager.CancellableFSDataOutputStream;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

/**
 * Writes the checksum that Delta puts beside each commit on S3 with one PUT: an object is there whole or not at all. Spark's own managers
 * write it aside and rename it, for which S3A makes twenty requests. Everything else is left to them.
 */
public final class ChecksumFileManager extends FileSystemBasedCheckpointFileManager {
    private final FileSystem fileSystem;

    public ChecksumFileManager(Path path, Configuration hadoopConf) throws IOException {
        super(path, hadoopConf);
        fileSystem = path.getFileSystem(hadoopConf);
    }

    @Override
    public CancellableFSDataOutputStream createAtomic(Path path, boolean overwriteIfPossible) {
        boolean isChecksum = path.getName().endsWith(".crc") && path.getParent().getName().equals("_delta_log");
        if (!isChecksum || !ConditionalPutLogStore.isS3A(fileSystem)) {
            return super.createAtomic(path, overwriteIfPossible);
        }
        try {
            // Only who committed a version writes its checksum, so that there is none to be kept.
            var builder = fileSystem.createFile(path).overwrite(true).recursive();
            builder.opt("fs.s3a.create.performance", true);
            return new Put(builder.build());
        } catch (IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    private static final class Put extends CancellableFSDataOutputStream {
        private final FSDataOutputStream out;

        Put(FSDataOutputStream out) {
            super(out);
            this.out = out;
        }

        @Override
        public void cancel() {
            out.abort();
        }
    }
}
